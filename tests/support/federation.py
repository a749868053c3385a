"""A whole federation in one call, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcross.client import cache
from fedcross.client.app import app as client_app
from fedcross.conf.compose import compose, join
from fedcross.conf.schema import RunConfig, check, load
from fedcross.engines.grid import LocalGrid
from fedcross.server.observers import Observer
from fedcross.server.session import Session

#: Fast and real: 200 digits over 6 clients, 3 drawn each round. Methods are tested as the papers have them, undefended.
SMALL = (
    "task=digits",
    "task.limit=200",
    "task.limit_test=100",
    "partition=iid",
    "partition.clients=6",
    "clients_per_round=3",
    "rounds=3",
    "train.epochs=1",
    "train.batch=16",
    "logger=none",
    "defence.enabled=false",
)


def session(folder: Path, *overrides: str, app: Any = client_app) -> Session:
    """Return a ready session of a small run that writes into `folder`."""
    config, settled = settle(folder, *overrides)
    clients = config.partition.clients  # type: ignore[attr-defined]
    cache._open.clear()  # the clients of every session are new processes in earnest: nothing in memory is shared
    return Session(config, LocalGrid(app, clients, {"overrides": join(settled)}), Observer())


def settle(folder: Path, *overrides: str) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a small run that writes into `folder`, and the overrides for its clients.

    The folders and the round to stop at are set in what was composed: compositions are remembered by their overrides,
    and take longer than most of these runs. Clients read none of them. They find the whole configuration loaded, as in
    a local run.
    """
    settled = [one for one in [*SMALL, *overrides] if not one.startswith(("resume=", "stop_at="))]
    own: dict[str, Any] = {"output": str(folder), "resume": None}
    own |= dict(one.split("=", 1) for one in overrides if one not in settled)
    load(settled)
    return check({**compose(settled), **own}), settled


def run(folder: Path, *overrides: str, app: Any = client_app) -> Session:
    """Run a small federation to its end and return the session."""
    ready = session(folder, *overrides, app=app)
    ready.execute()
    return ready


def same(a: Any, b: Any) -> bool:
    """Return whether two models agree to the bit."""
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and (a[n] == b[n]).all() for n in a)
