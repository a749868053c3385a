"""Multi-model federated learning on Flower: FedCross, FedFusion, FedCT and the methods they are measured against.

Four names are enough for a notebook or a script, besides the methods themselves (``from fedcross import FedCross``):

- :func:`run` runs one configuration and returns a :class:`Run`,
- :func:`sweep` runs several and returns their :class:`Run` objects,
- :func:`load` opens the folder of an earlier run,
- :class:`Run` is a finished run: metrics, result, model, folder.

The folders ``strategies``, ``client`` and so on are subpackages (``fedcross.strategies``, ``fedcross.client``, ...). In
a checkout and in Flower's app bundle they lie beside this folder, in an installed wheel inside it.
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING, Any

_core = os.path.join(__path__[0], "core")  # noqa: PTH118 - pathlib would double the time of this import
if os.path.islink(_core) or not os.path.isdir(_core):  # noqa: PTH112, PTH114
    __path__.insert(0, os.path.dirname(os.path.abspath(__path__[0])))  # noqa: PTH100, PTH120

if TYPE_CHECKING:
    __version__: str
    from fedcross.client.app import app as client_app
    from fedcross.client.own_app import tell_partition as tell_partition
    from fedcross.server.api import Run as Run
    from fedcross.server.api import load as load
    from fedcross.server.api import run as run
    from fedcross.server.api import sweep as sweep
    from fedcross.server.app import app as server_app
    from fedcross.strategies.adaptivefl import AdaptiveFL as AdaptiveFL
    from fedcross.strategies.centralized import Centralized as Centralized
    from fedcross.strategies.classic import ClassicFedCross as ClassicFedCross
    from fedcross.strategies.clusamp import CluSamp as CluSamp
    from fedcross.strategies.daisychain import DaisyChain as DaisyChain
    from fedcross.strategies.fedasam import FedASAM as FedASAM
    from fedcross.strategies.fedasync import FedAsync as FedAsync
    from fedcross.strategies.fedavg import FedAvg as FedAvg
    from fedcross.strategies.fedbuff import FedBuff as FedBuff
    from fedcross.strategies.fedcross import FedCross as FedCross
    from fedcross.strategies.fedcross_async import FedCrossAsync as FedCrossAsync
    from fedcross.strategies.fedct import FedCT as FedCT
    from fedcross.strategies.feddecorr import FedDecorr as FedDecorr
    from fedcross.strategies.feddyn import FedDyn as FedDyn
    from fedcross.strategies.fedexg import FedExg as FedExg
    from fedcross.strategies.fedexp import FedExP as FedExP
    from fedcross.strategies.fedfan import FedFan as FedFan
    from fedcross.strategies.fedfusion import FedFusion as FedFusion
    from fedcross.strategies.fedgen import FedGen as FedGen
    from fedcross.strategies.fedlc import FedLC as FedLC
    from fedcross.strategies.fedmr import FedMR as FedMR
    from fedcross.strategies.fedmut import FedMut as FedMut
    from fedcross.strategies.fednova import FedNova as FedNova
    from fedcross.strategies.fedntd import FedNTD as FedNTD
    from fedcross.strategies.fedproc import FedProc as FedProc
    from fedcross.strategies.fedprox import FedProx as FedProx
    from fedcross.strategies.fedsam import FedSAM as FedSAM
    from fedcross.strategies.flwr import Flwr as Flwr
    from fedcross.strategies.gitfl import GitFL as GitFL
    from fedcross.strategies.heterofl import HeteroFL as HeteroFL
    from fedcross.strategies.ima import IMA as IMA
    from fedcross.strategies.masterpull import MasterPull as MasterPull
    from fedcross.strategies.moon import Moon as Moon
    from fedcross.strategies.pgct import PGCT as PGCT
    from fedcross.strategies.scaffold import Scaffold as Scaffold
    from fedcross.strategies.solo import Solo as Solo

# A list of constants: Flower reads in it, without an import, that its two apps are here. They cannot be named as
# "fedcross.server.app:app" in pyproject.toml: Flower looks for one while another thread imports the other, and finds
# nothing in a package that is half made.
__all__ = [
    "IMA", "PGCT", "AdaptiveFL", "Centralized", "ClassicFedCross", "CluSamp", "DaisyChain", "FedASAM", "FedAsync",
    "FedAvg", "FedBuff", "FedCT", "FedCross", "FedCrossAsync", "FedDecorr", "FedDyn", "FedExP", "FedExg",
    "FedFan", "FedFusion", "FedGen", "FedLC", "FedMR", "FedMut", "FedNTD", "FedNova", "FedProc", "FedProx", "FedSAM",
    "Flwr", "GitFL", "HeteroFL", "MasterPull", "Moon", "Run", "Scaffold", "Solo", "client_app", "load", "run",
    "server_app", "sweep", "tell_partition",
]  # fmt: skip
_ELSEWHERE = {
    **dict.fromkeys(("Run", "load", "run", "sweep"), "fedcross.server.api"),
    "ClassicFedCross": "fedcross.strategies.classic",
    "FedCrossAsync": "fedcross.strategies.fedcross_async",
    "tell_partition": "fedcross.client.own_app",
}
_APPS = {"server_app": "fedcross.server.app", "client_app": "fedcross.client.app"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``import fedcross`` itself stays fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fedcross")
    if name in _APPS:
        return import_module(_APPS[name]).app
    if name not in __all__:
        raise AttributeError(f"module 'fedcross' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, f"fedcross.strategies.{name.lower()}")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
