"""What is over is deleted in small transactions, beside the requests, and after a kill at the next start."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import SubStatus
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from sqlalchemy import text

from fedcross.engines.executor import sweep
from fedcross.engines.executor.ledger import SPARE, free_bytes
from fedcross.engines.executor.sweep import PAUSE_S, STEP_ROWS, Sweeper, attach
from fedcross.strategies.wire.records import encode
from tests.support.clock import Clock
from tests.support.link_state import Run, opened

TABLES = ("objects", "object_children", "run_objects", "message_ins", "message_res", "object_push_sessions")
KIB = 1 << 10


class Link:
    """A SuperLink's state in a file, whose sweeper works when the test says so."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.clock = path, Clock()
        self.slept: list[float] = []
        self.sweeper = Sweeper(self.clock.monotonic, self.slept.append)
        self.started: list[Any] = []
        monkeypatch.setattr(self.sweeper, "start", self.started.append)
        for kind, name in ((SqlLinkState, "initialize"), (SqlLinkState, "cleanup_run"), (SqlObjectStore, "delete")):
            monkeypatch.setattr(kind, name, getattr(kind, name))
        monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
        attach(self.sweeper)
        self.state = opened(path)

    def rows(self) -> dict[str, int]:
        """Return how many rows each table has."""
        with sqlite3.connect(self.path) as database:
            return {one: database.execute(f"SELECT count(*) FROM {one}").fetchone()[0] for one in TABLES}


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    return Link(tmp_path / "state.db", monkeypatch)


def content(number: int, size: int = 2000) -> RecordDict:
    values = np.random.default_rng(number).standard_normal(size).astype(np.float32)
    return RecordDict({"arrays": encode({"w": values}), "config": ConfigRecord({"n": number})})


def filled(link: Link, requests: int = 3) -> Run:
    """Return a run with requests, complete replies and one that is not complete."""
    run = Run(link.state)
    for number in range(requests):
        request = run.request(run.nodes[0], content(number))
        reply = run.reply(request, content(100 + number))
        if number:
            run.send(reply, run.nodes[0])
        else:
            run.announce(reply, run.nodes[0])
    return run


def steps(link: Link) -> int:
    """Sweep; return in how many transactions."""
    before = len(link.slept)
    link.sweeper.sweep(link.state)
    return len(link.slept) - before


@pytest.mark.slow
def test_the_request_that_ends_a_run_deletes_nothing_itself(link: Link) -> None:
    run = filled(link)
    before = link.rows()
    assert link.state.stop_run(run.id)
    assert link.rows() == before
    assert link.started == [link.state]  # the next SuperLink deletes it if this one is killed
    steps(link)
    assert not any(link.rows().values())


@pytest.mark.slow
def test_only_runs_that_are_over_are_deleted(link: Link) -> None:
    going = filled(link)
    before = link.rows()
    assert steps(link) == 0
    over = filled(link)
    over.finish()
    assert steps(link) > 0
    assert link.rows() == before
    assert sweep.over(link.state) is None
    request = going.requests[1]
    [reply] = going.grid().pull_messages([request.metadata.message_id])
    assert reply.has_error() or reply.has_content()


@pytest.mark.slow
def test_objects_that_another_run_has_too_stay(link: Link) -> None:
    """Arrays are stored once, whoever sends them: a finished run leaves those of the next one alone."""
    one, two = Run(link.state), Run(link.state)
    shared = content(7)
    for run in (one, two):
        run.request(run.nodes[0], RecordDict(dict(shared)))
    one.finish()
    steps(link)
    objects = {one.object_id for one in two.parts(two.requests[0])}
    assert all(link.state.object_store.get(name) for name in objects)
    assert link.rows()["objects"] == len(objects)
    two.finish()
    steps(link)
    assert not any(link.rows().values())


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["STEP_ROWS", "STEP_BYTES", "STEP_S"])
def test_one_transaction_deletes_a_little(link: Link, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """However much there is: a limit of rows, of bytes and of time."""
    run = filled(link)
    run.finish()
    monkeypatch.setattr(sweep, limit, 0.5 if limit == "STEP_S" else 1)
    if limit == "STEP_S":
        ticks = itertools.count()
        monkeypatch.setattr(link.sweeper, "_clock", lambda: float(next(ticks)))
    deleted: list[int] = []
    one = sweep._delete

    def counted(session: Any, name: str, *arguments: Any) -> Any:
        deleted[-1] += limit != "STEP_BYTES" or sweep._size(session, name) > 0  # not what was announced alone
        return one(session, name, *arguments)

    monkeypatch.setattr(sweep, "_delete", counted)
    while True:
        deleted.append(0)
        if not link.sweeper.step(link.state):
            break
    assert max(deleted) <= 4
    assert sum(deleted) > 20
    assert not any(link.rows().values())


@pytest.mark.slow
def test_an_object_with_many_children_takes_many_transactions(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "STEP_ROWS", 4)
    run = Run(link.state)
    run.request(run.nodes[0], RecordDict({f"r{i}": ConfigRecord({"i": i}) for i in range(30)}))
    run.finish()
    left = [link.rows()["object_children"]]
    while link.sweeper.step(link.state):
        left.append(link.rows()["object_children"])
    assert max(before - after for before, after in itertools.pairwise(left)) < 8
    assert not any(link.rows().values())


@pytest.mark.slow
def test_others_get_the_lock_for_twice_as_long_in_between(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(link, 1).finish()
    taken = iter([0.0, 3.0, 0.0])
    step = link.sweeper.step

    def slow(state: Any) -> bool:
        link.clock.now += next(taken, 0.0)
        return step(state)

    monkeypatch.setattr(link.sweeper, "step", slow)
    monkeypatch.setattr(sweep, "STEP_ROWS", 1)
    steps(link)
    assert link.slept[:3] == [PAUSE_S, 6.0, PAUSE_S]


@pytest.mark.slow
def test_a_kill_in_between_leaves_nothing_broken(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every single step another SuperLink could go on: what is left has no link to what is gone."""
    filled(link, 2).finish()
    monkeypatch.setattr(sweep, "STEP_ROWS", 1)
    while link.sweeper.step(link.state):
        with sqlite3.connect(link.path) as database:
            assert database.execute("PRAGMA foreign_key_check").fetchall() == []
            parents = "SELECT count(*) FROM object_children WHERE child_id = object_id"
            wrong = f"SELECT count(*) FROM objects WHERE ref_count != ({parents})"
            assert database.execute(wrong).fetchone() == (0,)
        link.sweeper = Sweeper(link.clock.monotonic, link.slept.append)  # which knows nothing
    assert not any(link.rows().values())


@pytest.mark.slow
def test_a_transaction_that_fails_is_done_again(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    run = filled(link)
    request = run.requests[1]
    link.state.object_store.delete(request.metadata.message_id)
    one, calls = sweep._delete, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise sqlite3.OperationalError("database is locked")
        return one(*arguments)

    monkeypatch.setattr(sweep, "_delete", failing)
    before = link.rows()
    with pytest.raises(sqlite3.OperationalError):
        link.sweeper.sweep(link.state)
    assert link.rows() == before
    steps(link)
    assert not [part for part in run.parts(request) if part.object_id in link.state.object_store]


@pytest.mark.slow
def test_a_message_that_is_confirmed_goes_at_once_and_its_objects_soon(link: Link) -> None:
    run = Run(link.state)
    request = run.request(run.nodes[0], content(1))
    names = [one.object_id for one in run.parts(request)]
    store = link.state.object_store
    store.delete(request.metadata.message_id)
    assert request.metadata.message_id not in store
    assert len(store) == len(names) - 1
    assert steps(link) > 0
    assert len(store) == 0


@pytest.mark.slow
def test_what_is_announced_again_before_it_is_deleted_stays(link: Link) -> None:
    run = Run(link.state)
    shared = content(3)
    one = run.request(run.nodes[0], RecordDict(dict(shared)))
    link.state.object_store.delete(one.metadata.message_id)
    two = run.request(run.nodes[1], RecordDict(dict(shared)))
    steps(link)
    assert all(link.state.object_store.get(part.object_id) for part in run.parts(two))


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["new", "of before"])
def test_space_goes_back_to_the_disk_and_is_counted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    if old:
        opened(tmp_path / "state.db")
    link = Link(tmp_path / "state.db", monkeypatch)
    run = Run(link.state)
    for number in range(3):
        run.request(run.nodes[0], content(number, 100_000))
    run.finish()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=SPARE))
    steps(link)  # too little to be worth it
    assert (free_bytes(link.state) or 0) > SPARE + 1000 * KIB
    monkeypatch.setattr(sweep, "WORTH", 1000 * KIB)
    monkeypatch.setattr(sweep, "CHEAP", 0)
    steps(link)  # too much is left
    assert (free_bytes(link.state) or 0) > SPARE + 1000 * KIB
    monkeypatch.setattr(sweep, "CHEAP", 1000 * KIB)
    steps(link)
    assert free_bytes(link.state) == SPARE
    assert link.path.stat().st_size < 1000 * KIB
    assert link.state.get_run_info(run_ids=[run.id])[0].run_id == run.id
    with link.state.session() as session:
        assert session.scalar(text("PRAGMA journal_size_limit")) == 1 << 26


@pytest.mark.slow
def test_the_log_of_changes_is_emptied_when_the_last_run_is_over_and_nobody_reads(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LONG_LOG", 100 * KIB)
    changes = link.path.with_name(f"{link.path.name}-wal")
    one, two = Run(link.state), Run(link.state)
    one.request(one.nodes[0], content(1, 100_000))
    one.finish()
    steps(link)
    assert changes.stat().st_size > 100 * KIB  # the other run goes on
    two.finish()
    with sqlite3.connect(link.path) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM run").fetchone()
        link.state.acknowledge_node_heartbeat(two.nodes[0], 30.0)
        steps(link)
        assert changes.stat().st_size > 100 * KIB
    reader.close()
    steps(link)
    assert changes.stat().st_size == 0
    assert link.state.acknowledge_node_heartbeat(two.nodes[0], 30.0)


@pytest.mark.slow
def test_a_state_in_memory_stays_flowers(link: Link) -> None:
    state = opened(None)
    run = Run(state)
    run.request(run.nodes[0])
    assert state.stop_run(run.id)
    assert len(state.object_store) == 0
    assert link.started == [link.state]


def test_the_thread_goes_on_after_an_error(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Enough(BaseException):
        """Ends the thread's loop."""

    calls: Iterator[Callable[[], None]] = iter([lambda: _raise(OSError("disk full")), lambda: None])

    def swept(state: Any) -> None:
        (next(calls, None) or (lambda: _raise(Enough())))()

    waits: list[float] = []
    monkeypatch.setattr(link.sweeper, "sweep", swept)
    monkeypatch.setattr(link.sweeper._woken, "wait", waits.append)
    with pytest.raises(Enough):
        link.sweeper._work(link.state)
    assert waits == [sweep.LOOK_S] * 2
    assert "disk full" in caplog.text


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.slow
def test_a_run_that_is_stopped_is_over(link: Link) -> None:
    run = filled(link)
    assert sweep.over(link.state) is None
    link.state.finish_task(run.task, SubStatus.FAILED, "")
    assert sweep.uint64(sweep.over(link.state) or 0) == run.id
    assert STEP_ROWS > 1
