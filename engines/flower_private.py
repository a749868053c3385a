"""The private names of Flower that fedcross uses. No other file imports Flower's protocol or server packages.

The names are the same in every version of :data:`TRIED`. For another version :func:`tried` returns False: devices then
run without :mod:`engines.warm_device`. A name that is missing ends the program that needs it: nothing starts without
its protection.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from flwr.supercore.task_identity import TaskIdentity

if TYPE_CHECKING:
    from flwr.proto import control_pb2, runtime_pb2
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

#: Releases of Flower with which the superlink tests passed; 1.43 as flwr-nightly 1.43.0.dev20261026.
TRIED = ("1.42", "1.43")

#: Name -> module. A name is imported when it is first used: most of these modules take a second.
_MODULES = {
    "ControlHttpClient": "flwr.supercore.control",
    "control_pb2": "flwr.proto",
    "SuperLinkLifespan": "flwr.superlink.cli.flower_superlink",
    "_parse_superlink_lifespan_config": "flwr.superlink.cli.flower_superlink",
    "create_app": "flwr.superlink.main",
    "RuntimeHttpClient": "flwr.supercore.runtime",
    "RuntimeTokenHttpInterceptor": "flwr.supercore.interceptors",
    "runtime_pb2": "flwr.proto",
    "pull_task_input": "flwr.supernode.runtime.run_clientapp",
    "push_message": "flwr.supernode.runtime.run_clientapp",
    "push_task_output": "flwr.supernode.runtime.run_clientapp",
}

__all__ = [
    "TRIED", "ControlHttpClient", "RuntimeHttpClient", "RuntimeTokenHttpInterceptor", "SuperLinkLifespan",
    "TaskIdentity", "_parse_superlink_lifespan_config", "control_pb2", "create_app", "identify", "pull_task_input",
    "push_message", "push_task_output", "runtime_pb2", "tried",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return getattr(module, name, None) or import_module(f"{_MODULES[name]}.{name}")


def installed() -> str:
    """Return the version of the installed Flower, a nightly or a release."""
    try:
        return version("flwr-nightly")
    except PackageNotFoundError:
        return version("flwr")


def tried() -> bool:
    """Return whether the installed Flower is one of :data:`TRIED`."""
    return ".".join(installed().split(".")[:2]) in TRIED


def identify(run_id: int, node_id: int, task_id: int) -> None:
    """Set Flower's identity of this process, which ``Message`` reads."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, task_id
