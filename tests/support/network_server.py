"""The ServerApp of :mod:`tests.support.network`: the real session, and a SuperLink that dies at named points.

A SuperExec starts it, or it is a process that takes the run's task itself::

    python -m tests.support.network_server PORT AUTHORITY SECRET OVERRIDES
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

#: Points of :data:`tests.support.killer.POINTS`, by the names of the test plan.
POINTS = (
    *("before_sampling", "after_sampling", "push", "first_pull"),
    *("validation", "reply_logged", "mixing", "checkpoint_rename"),
)


def install(kills: list[tuple[str, int]], work: Path, grid: type[Grid]) -> None:
    """Let the SuperLink of the network in `work` be killed at each (point, round)."""
    from fedcross.server.session import Session
    from tests.support import killer

    clocks = [killer.Clock(number, lambda: int((work / "superlink.pid").read_text()), grid) for _, number in kills]
    for (point, _), clock in zip(kills, clocks):
        killer.POINTS[point](clock)

    def begun(_: Session, number: int) -> None:
        for clock in clocks:
            clock.now = number

    killer.before(Session, "_round", begun)


def execute(found: Grid, overrides: list[str]) -> None:
    """Do the run that `overrides` describe; kill the SuperLink where the harness asked for it."""
    from fedcross.conf.schema import load
    from fedcross.engines.judged import judged
    from fedcross.server.session import Session
    from tests.support.federation import Quiet

    work = Path(os.environ["FEDCROSS_NETWORK"])
    (work / "server.pid").write_text(str(os.getpid()))
    install(json.loads((work / "kills.json").read_text()), work, type(judged(found)))
    try:
        Session(load(overrides), found, Quiet()).execute()
    except Exception:
        (work / "server.log").write_text(traceback.format_exc())
        raise


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``run_config["overrides"]`` describes."""
    from fedcross.conf.compose import split

    execute(grid, split(str(context.run_config["overrides"])))


def serve(port: str, authority: str, secret: str, overrides: str) -> None:
    """Import everything, wait for the next run of the SuperLink on `port`, and be its server."""
    from fedcross.conf.compose import split
    from fedcross.server.session import Session
    from tests.support.inner_server import grid

    assert Session
    with grid(int(port), Path(authority), Path(secret)) as found:
        execute(found, split(overrides))


if __name__ == "__main__":
    serve(*sys.argv[1:])
