"""What every engine is handed: the two apps and how the run is described. Engines know nothing else of fedcross."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

Together = Callable[[list[Message], list[Context], int | None, bool], list[Message]]


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes
    ----------
    overrides : str
        The configuration as it travels in Flower's run config.
    clients : int
        Size of the federation.
    settings : Any
        The engine's own ``Params``.
    server_app, client_app : ServerApp, ClientApp
        Used by the engine that runs in this process.
    app_folder : Path
        Where the packages lie, for the engines that start processes.
    output : Path
        The run's folder.
    warm : callable, optional
        Loads into this process what clients need. Returns whether forks of this process may use it, and the number of
        examples of each partition.
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
