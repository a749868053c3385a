"""The ServerApp: composes the run's configuration and runs it on the grid that Flower passes in."""

from __future__ import annotations

import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcross.core.errors import FederationError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that ``run_config["overrides"]`` describes."""
    from fedcross.conf.schema import load_text
    from fedcross.server.progress import pick
    from fedcross.server.session import Session

    config = load_text(str(context.run_config["overrides"]))
    try:
        session = Session(config, grid, pick())
        session.execute()
    except MemoryError as error:
        raise FederationError(f"The ServerApp is out of memory ({error}). Lower clients_per_round.") from error
    print(f"Run folder: {session.folder}", file=sys.stdout, flush=True)
