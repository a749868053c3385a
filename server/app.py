"""The ServerApp: composes the run's configuration and runs it on the grid that Flower passes in."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcross.conf.schema import load_text
from fedcross.core.errors import FedcrossError, FederationError
from fedcross.core.events import failed, log_format, say, structured
from fedcross.core.settings import overrides_of
from fedcross.server.announce import ending
from fedcross.server.observers.messages import progress
from fedcross.server.run_folder import folder_of, written
from fedcross.server.session import Session
from fedcross.strategies.round.nodes import simulated

#: The program in which Flower runs a ServerApp on its own.
PROGRAM = "flwr-serverapp"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that the run config describes (:mod:`core.settings`)."""
    nodes = len(list(grid.get_node_ids())) if simulated(grid) else None
    overrides = overrides_of(context.run_config, nodes)
    if apart := Path(sys.argv[0]).name == PROGRAM:
        logging.getLogger("flwr").addFilter(plain)
    config = load_text(overrides)
    with log_format(config.log.format):
        try:
            with written(folder := folder_of(config)):
                if not (config.output or config.resume):  # `flwr run`: no command has named it
                    say(f"folder {folder}")
                session = Session(config, grid, progress(), folder)
                result = session.execute()
        except MemoryError as error:
            raise FederationError(f"The ServerApp is out of memory ({error}). Lower clients_per_round.") from error
        except FedcrossError as error:
            if apart:  # otherwise the command reports it
                failed(error)
            raise
        if not structured():
            say(ending(result, folder, session.done, config.stop_at))


def plain(record: logging.LogRecord) -> bool:
    """Let Flower log an error of fedcross without a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedcrossError):
        said = f"{record.getMessage()}: {type(error).__name__}: {error}"
        record.msg, record.args, record.exc_info = said, (), None
    return True
