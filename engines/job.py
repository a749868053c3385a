"""The interface of engines: the job that an engine receives, and the attributes that it must declare.

Engines use nothing else of fedcross. Their grids declare :class:`strategies.round.nodes.LocalClients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from flwr.app import Context, Message
from flwr.serverapp import ServerApp

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings

#: ``(message, context) -> reply``: what a ClientApp is too.
Answer = Callable[[Message, Context], Message]
#: ``(messages, contexts, memory in bytes or None, compiled) -> replies``: answers many train messages at once.
Together = Callable[[list[Message], list[Context], int | None, bool], list[Message]]


@dataclass(frozen=True)
class Job:
    """One run, as an engine receives it."""

    overrides: str  #: the configuration as it travels in Flower's run config
    clients: int  #: size of the federation
    settings: Any  #: the engine's own ``Params``
    server_app: ServerApp
    client: Answer  #: the run's clients in this process
    app_folder: Path  #: holds the packages, for engines that start processes
    output: Path  #: the run's folder
    #: Loads into this process all that clients need; returns whether forks may use it, and each partition's examples.
    warm: Callable[[], tuple[bool, Sequence[int]]] | None = None
    together: Together | None = None
    gpus: int = 0  #: GPUs of this machine on which clients may train; 0 for a CPU


@dataclass(frozen=True)
class Capabilities:
    """What the server must know about an engine besides its grid."""

    #: Its clients run on this machine, although the server gets one of Flower's own grids, which cannot declare it.
    simulates: bool = False
    #: Each machine reads data from its own folder: the configuration that it receives names none of this machine's.
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
