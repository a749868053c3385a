"""Large objects wait outside the database, so that nobody else waits for them."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store import sql_object_store
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedcross.engines.executor import turns as module
from fedcross.engines.executor.fair import Call, Caller, current
from fedcross.engines.executor.sweep import Sweeper
from fedcross.engines.executor.turns import Turns, attach
from tests.support.clock import Clock
from tests.support.link_state import Run, opened

PATIENCE_S = 60.0


class Watched(Turns):
    """Turns whose queue a test can wait for."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.slept = clock, list[float]()
        super().__init__(clock.monotonic, self.slept.append)

    def queued(self, number: int) -> None:
        """Wait until so many wait for a turn."""
        until = time.monotonic() + PATIENCE_S
        while len(self._queue) < number:
            assert time.monotonic() < until, "nobody waits for a turn"
            time.sleep(0.001)


@pytest.fixture
def turns() -> Watched:
    return Watched(Clock())


def started(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_turns_come_one_at_a_time_in_the_order_of_asking(turns: Watched) -> None:
    order: list[int] = []

    def work(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = []
    with turns.turn():
        for number in range(3):
            threads.append(started(work, number))
            turns.queued(number + 1)
        assert order == []
    for one in threads:
        one.join(PATIENCE_S)
    assert order == [0, 1, 2]


def test_the_time_until_the_turn_and_the_pause_after_it_are_not_the_callers(turns: Watched) -> None:
    call = Call(Caller("node 1", known=True), "path")

    def work() -> None:
        current.set(call)
        with turns.turn():
            turns.clock.now += 0.3

    def pause(seconds: float) -> None:
        turns.clock.now += seconds

    turns._sleep = pause
    with turns.turn():
        first = started(work)
        turns.queued(1)
        second = started(turns._take)
        turns.queued(2)
        turns.clock.now += 2.0
    for one in (first, second):
        one.join(PATIENCE_S)
    assert call.waited == pytest.approx(2.0 + module.PAUSE_S + 0.3)


def test_after_a_turn_others_have_the_lock_for_as_long_if_there_is_a_queue(turns: Watched) -> None:
    with turns.turn():
        turns.clock.now += 0.2
    assert turns.slept == []
    for seconds, pause in ((0.2, 0.2), (9.0, module.PAUSE_S)):
        with turns.turn():
            other = started(lambda: turns._take())
            turns.queued(1)
            turns.clock.now += seconds
        other.join(PATIENCE_S)
        turns._give()
        assert turns.slept.pop() == pytest.approx(pause)
    assert turns.slept == []


def test_who_waits_for_too_long_asks_again_later_and_takes_no_turn(
    turns: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_S", 0.0)
    with turns.turn(), pytest.raises(HTTPException) as later, turns.turn():
        pass
    assert later.value.status_code == 503
    with turns.turn():
        pass


class Link:
    """A state in a file, one object that is announced, and its content."""

    def __init__(self, path: Path, turns: Watched) -> None:
        self.path, self.turns = path, turns
        self.state = opened(path)
        self.run = Run(self.state)
        self.content = ArrayChunk(b"x" * 3000).deflate()
        self.name = hashlib.sha256(self.content).hexdigest()
        self.session = self.state.start_session(self.run.id)
        self.state.preregister_object_tree(ObjectTree(object_id=self.name), self.session)

    def store(self) -> bool:
        return bool(self.state.store_object(self.run.id, self.session, self.name, self.content))


@pytest.fixture
def link(tmp_path: Path, turns: Watched, monkeypatch: pytest.MonkeyPatch) -> Link:
    for kind, name in ((SqlLinkState, "store_object"), (SqlObjectStore, "put")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    monkeypatch.setattr(module, "LARGE", 2000)
    attach(turns)
    return Link(tmp_path / "state.db", turns)


def test_who_waits_for_a_turn_keeps_the_database_from_nobody(link: Link) -> None:
    stored: list[bool] = []
    with link.turns.turn():
        thread = started(lambda: stored.append(link.store()))
        link.turns.queued(1)
        with closing(sqlite3.connect(link.path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        link.run.request(link.run.nodes[0])  # small objects do not wait
        assert stored == []
    thread.join(PATIENCE_S)
    assert stored == [True]
    assert link.state.object_store.get(link.name) == link.content


def test_digests_are_compared_before_the_database_is_locked(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(content: bytes) -> str:
        raise AssertionError("compared with the lock in hand")

    monkeypatch.setattr(sql_object_store, "get_object_id", never)
    right, link.content = link.content, link.content + b"!"
    assert not link.store()
    assert "another digest" in caplog.text
    link.content = b"no object of Flower's" * 1000
    link.name, known = hashlib.sha256(link.content).hexdigest(), link.name
    assert not link.store()
    assert "Failed to store object" in caplog.records[-1].getMessage()
    link.content, link.name = right, known
    assert link.store()
    assert link.state.object_store.get(link.name) == right
    with pytest.raises(AssertionError, match="lock in hand"):
        link.state.object_store.put(link.name, right)  # whoever else stores is compared as before


@pytest.mark.slow
def test_the_sweeper_takes_its_turn_too(link: Link) -> None:
    swept: list[bool] = []
    sweeper = Sweeper(turns=link.turns)
    link.run.request(link.run.nodes[0])
    link.run.finish()
    with link.turns.turn():
        thread = started(lambda: swept.append(sweeper.step(link.state)))
        link.turns.queued(1)
        assert swept == []
    thread.join(PATIENCE_S)
    assert swept == [True]


@pytest.mark.slow
def test_a_state_in_memory_stays_flowers(link: Link) -> None:
    link.state = opened(None)
    link.run = Run(link.state)
    link.session = link.state.start_session(link.run.id)
    link.state.preregister_object_tree(ObjectTree(object_id=link.name), link.session)
    with link.turns.turn():
        assert link.store()
