"""What every engine is handed: the two apps and how the run is described. Engines know nothing else of fedcross."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


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
    """

    overrides: str
    clients: int
    settings: Any
    server_app: ServerApp
    client_app: ClientApp
    app_folder: Path
    output: Path
