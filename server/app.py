"""The ServerApp: composes the run's configuration and runs it on the grid that Flower passes in."""

from __future__ import annotations

import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that ``run_config["overrides"]`` describes."""
    from fedcross.conf.schema import load_text
    from fedcross.server.progress import pick
    from fedcross.server.session import Session

    config = load_text(str(context.run_config["overrides"]))
    session = Session(config, grid, pick())
    session.execute()
    print(f"Run folder: {session.folder}", file=sys.stdout, flush=True)
