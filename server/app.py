"""The ServerApp: composes the run's configuration and runs it on the grid that Flower passes in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcross.core.causes import PAGE, cause_of
from fedcross.core.errors import FedcrossError, FederationError, counted
from fedcross.core.events import failed, log_format, say, structured
from fedcross.core.overrides import shown, split
from fedcross.core.run_config import overrides_of

#: The program in which Flower runs a ServerApp on its own.
PROGRAM = "flwr-serverapp"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that the run config describes (:mod:`core.run_config`)."""
    from fedcross.conf.schema import load_text
    from fedcross.server.progress import pick
    from fedcross.server.run_folder import folder_of, written
    from fedcross.server.session import Session
    from fedcross.strategies.round.nodes import simulated

    nodes = len(list(grid.get_node_ids())) if simulated(grid) else None
    overrides = overrides_of(context.run_config, nodes)
    if apart := Path(sys.argv[0]).name == PROGRAM:
        logging.getLogger("flwr").addFilter(plain)
    config, given = load_text(overrides), split(overrides)
    with log_format(config.log.format):
        try:
            with written(folder := folder_of(config)):
                if not (config.output or config.resume):  # `flwr run`: no command has named it
                    say(f"folder {folder}")
                session = Session(config, grid, pick(), folder)
                result = session.execute()
        except MemoryError as error:
            raise FederationError(f"The ServerApp is out of memory ({error}). Lower clients_per_round.") from error
        except FedcrossError as error:
            if apart:  # else the command tells it
                failed(error, given)
                if not structured() and (cause := cause_of(str(error), given)) is not None:
                    say(f"{error}\nCause: {cause.name} ({PAGE})")  # at once, to who reads along; the command ends later
            raise
        if not structured() and _ends["told"]:
            say(ending(result, folder, session.done, config.stop_at))


#: Whether the end of a run is told in this process.
_ends = {"told": True}


@contextmanager
def untold() -> Iterator[None]:
    """Do not say how a run ended that this process runs inside the block: nobody can go on with it."""
    before = _ends["told"]
    _ends["told"] = False
    try:
        yield
    finally:
        _ends["told"] = before


def plain(record: logging.LogRecord) -> bool:
    """Let Flower log an error of fedcross as its words, without the traceback that it shows of any."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedcrossError):
        said = f"{record.getMessage()}: {type(error).__name__}: {error}"
        record.msg, record.args, record.exc_info = said, (), None
    return True


def ending(result: Mapping[str, Any], folder: Path, begun: int = 0, stop_at: int | None = None) -> str:
    """Return the last line of a run that had `begun` rounds when it went on; its first lines have named the folder."""
    if not result:
        further = f"To go on: fedcross resume={shown(folder)} stop_at=null"
        if stop_at is not None and begun > stop_at:
            return f"Nothing was trained: the run has {counted(begun, 'round')}, more than stop_at={stop_at}. {further}"
        return f"Stopped at the round of stop_at. {further}"
    accuracy = result.get("final_accuracy")
    told = "" if accuracy is None else f", accuracy {100 * accuracy:.2f} % (best {100 * result['best_accuracy']:.2f} %)"
    lost = result.get("rounds_missing")
    missing = (
        f". Of {counted(lost, 'round')} the line in metrics.jsonl is missing: sums and means lack it" if lost else ""
    )
    return f"Finished: {counted(result['rounds'], 'round')}{told}{missing}"
