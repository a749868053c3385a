"""The interface of engines: the job that an engine receives, and the attributes that it must declare.

Engines use nothing else of fedcross. Their grids declare :class:`strategies.round.exchange.LocalClients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings

Together = Callable[[list[Message], list[Context], int | None, bool], list[Message]]


@dataclass(frozen=True)
class Job:
    """One run, as an engine receives it.

    Attributes
    ----------
    overrides : str
        The configuration as it travels in Flower's run config.
    clients : int
        Size of the federation.
    settings : Any
        The engine's own ``Params``.
    server_app, client_app : ServerApp, ClientApp
        For engines that run them in this process.
    app_folder : Path
        The folder that holds the packages, for engines that start processes.
    output : Path
        The run's folder.
    warm : callable, optional
        Loads into this process all that clients need. Returns whether forks of this process may use it, and the number
        of examples of each partition.
    gpus : int
        GPUs of this machine on which clients may train; 0 for a CPU.
    together : callable, optional
        ``(messages, contexts, memory, graph) -> replies``: answers many train messages at once, in order; `memory` in
        bytes or None, `graph` whether CUDA graphs are used. For the engine that trains a round as one computation.
    """

    overrides: str
    clients: int
    settings: Any
    server_app: ServerApp
    client_app: ClientApp
    app_folder: Path
    output: Path
    warm: Callable[[], tuple[bool, Sequence[int]]] | None = None
    together: Together | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Capabilities:
    """What the server must know about an engine besides its grid.

    Attributes
    ----------
    simulates : bool
        Whether its clients run on this machine although the server gets one of Flower's own grids, which cannot
        declare it. Grids of fedcross declare it themselves.
    own_folders : bool
        Whether each machine of its federation reads data from its own folder. Then the configuration that the machines
        receive does not contain this machine's folders.
    """

    simulates: bool = False
    own_folders: bool = False


@runtime_checkable
class Engine(Protocol):
    """A module of ``engines`` that configuration can choose."""

    Params: type[Settings]
    CAPABILITIES: Capabilities

    def run(self, job: Job) -> None:
        """Run `job` and return when it has ended."""
        ...


def engine_of(module: ModuleType) -> Engine:
    """Return `module` as an engine.

    Raises
    ------
    ConfigError
        If it does not define everything that an engine must define.
    """
    if not isinstance(module, Engine):
        raise ConfigError(f"{module.__name__}: not an engine. It must define Params, CAPABILITIES and run(job).")
    return module
