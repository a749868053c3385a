"""Runs Flower's SuperLink with more patience for a process that starts.

::

    python -m fedcross.deploy.patience flower-superlink --host 0.0.0.0 ...

Flower 1.41 gives a ServerApp 30 seconds from the moment its task is handed out to its first sign of life. On a busy
machine a start takes longer: its task is then handed out again, to one more process that starts beside the first and
makes both slower. The time is a constant of Flower's; a running process still has to give a sign of life every minute.
A device needs none of this: the supervisor of its worker gives the signs of life (:mod:`engines.executor`).
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from fedcross.core.causes import PAGE, cause_of
from fedcross.engines import guarded

#: Seconds for a start, and for a running process until it counts as dead (Flower's own).
START_S, ALIVE_S = 300, 60
_STATES = ("flwr.supercore.corestate.in_memory_corestate", "flwr.supercore.corestate.sql_corestate")
PROGRAM = "flower-superlink"


class Cause(logging.Filter):
    """Keeps an error of the web server that has a cause, which it says in the midst of lines on its start and end."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Look at a line of the log; it is passed on as it is."""
        if record.levelno >= logging.ERROR and cause_of(record.getMessage()) is not None:
            self.text = record.getMessage()
        return True

    def tell(self) -> None:
        """Say it as the last thing, with its cause."""
        if (cause := cause_of(self.text)) is not None:
            print(f"fedcross deploy: {self.text}\nCause: {cause.name} ({PAGE})", file=sys.stderr, flush=True)


def be_patient() -> None:
    """Change Flower's times, in the two modules that hold tasks."""
    for name in _STATES:
        module = import_module(name)
        for constant, seconds in (("HEARTBEAT_DEFAULT_INTERVAL", START_S), ("HEARTBEAT_PATIENCE", ALIVE_S / START_S)):
            if not hasattr(module, constant):
                raise SystemExit(f"{name} has no {constant}: this version of Flower is not supported.")
            setattr(module, constant, seconds)


def main() -> None:
    """Become the SuperLink, guarded too (:mod:`engines.guarded`)."""
    del sys.argv[0]
    if sys.argv[0] != PROGRAM:
        raise SystemExit(f"{sys.argv[0]}: start {PROGRAM}.")
    be_patient()
    last = Cause()
    logging.getLogger("uvicorn.error").addFilter(last)
    try:
        guarded.become(PROGRAM)
    finally:
        logging.getLogger("uvicorn.error").removeFilter(last)
        last.tell()


if __name__ == "__main__":
    main()
