"""How much a device announces and stores at the SuperLink."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from fedcross.engines.executor import ledger as ledgers
from fedcross.engines.executor.announced import limited
from fedcross.engines.executor.ledger import (
    GIVEN_UP_S,
    REFILL_S,
    UNFINISHED,
    free_bytes,
)
from fedcross.engines.executor.replies import Later, Refusals
from tests.support.fleet_door import NODE, Link, pushed
from tests.support.metered_door import MOST, QUOTA, MeteredDoor
from tests.support.trees import name, tree, wide


def test_a_reply_that_the_server_refused_on_its_way_is_not_unfinished() -> None:
    door = MeteredDoor()
    for number in range(3 * UNFINISHED):
        assert door.announce(tree(f"m{number}", tree(f"a{number}"))) == 200
        door.link.object_store.delete(name(f"m{number}"))  # the server has seen the tree, and wants none of it


def test_a_device_has_few_unfinished_replies(caplog: pytest.LogCaptureFixture) -> None:
    door = MeteredDoor()
    trees = [tree(f"m{i}", tree(f"a{i}")) for i in range(UNFINISHED + 2)]
    assert [door.announce(one) for one in trees] == [200] * UNFINISHED + [503] * 2
    assert door.link.pushes == UNFINISHED
    assert f"refused a reply for now of node {NODE}: {UNFINISHED} replies" in caplog.text
    assert door.announce(trees[0]) == 200  # a connection that broke
    assert door.announce(trees[-1], node=2) == 200
    assert door.put("a0", 5) == 200
    assert door.announce(trees[-1]) == 503
    assert door.put("m0", 5) == 200
    assert door.announce(trees[-2]) == 200  # m0 is complete
    assert door.announce(tree("z")) == 503
    door.now = GIVEN_UP_S
    assert door.announce(tree("z")) == 200


def test_announcements_at_the_same_time_count_too() -> None:
    ledger = ledgers.Ledger(MOST, QUOTA)
    for number in range(UNFINISHED):
        ledger.enter(NODE, f"m{number}", 1)
    with pytest.raises(Later):
        ledger.enter(NODE, "another", 1)
    ledger.left(NODE, "m0", 1, [], Link())
    ledger.enter(NODE, "another", 1)


def test_a_device_announces_large_replies_seldom() -> None:
    door = MeteredDoor()
    large = [wide(MOST - 1, salt=str(i)) for i in range(4)]
    assert [door.announce(one) for one in large] == [200, 200, 503, 503]
    assert door.announce(large[2], node=2) == 200
    door.now = REFILL_S - 0.5
    assert door.announce(large[2]) == 503
    door.now = REFILL_S
    assert door.announce(large[2]) == 200
    assert door.announce(large[3]) == 503


def test_an_error_of_flowers_frees_the_place() -> None:
    door = MeteredDoor(most=10_000)

    def broken(request: Any, state: Any) -> None:
        raise RuntimeError("database is locked")

    push = limited(broken, MOST, door.ledger, Refusals())
    for number in range(2 * UNFINISHED):
        with pytest.raises(RuntimeError):
            push(request=pushed(tree(f"m{number}")), state=door.link)
    assert door.announce(tree("m")) == 200


def test_each_run_has_its_own_bytes() -> None:
    link, ledger = Link(), ledgers.Ledger(MOST, QUOTA, free=lambda state: None)
    for run, text in ((1, "m"), (2, "n"), (1, "o")):
        link.object_store.preregister(run, tree(text))
        ledger.enter(NODE, name(text), 1)
        ledger.left(NODE, name(text), run, [name(text)], link)
    ledger.may_store(NODE, name("m"), QUOTA, link)
    ledger.stored(NODE, name("m"), QUOTA)
    ledger.may_store(NODE, name("n"), QUOTA, link)
    with pytest.raises(HTTPException, match="FEDCROSS_REPLY_MIB"):
        ledger.may_store(NODE, name("o"), 1, link)


def test_replies_that_are_gone_are_forgotten() -> None:
    door = MeteredDoor(most=10_000)
    for number in range(200):
        door.now += 10
        assert door.announce(tree(f"m{number}")) == 200
        assert door.put(f"m{number}", 1) == 200
        door.link.object_store.delete(name(f"m{number}"))
    assert len(door.ledger._accounts[NODE].replies) <= 33


def test_announcements_are_stored_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    door, entered, go = MeteredDoor(), threading.Event(), threading.Event()
    monkeypatch.setattr(ledgers, "QUEUE_S", 0.01)

    def slow(request: Any, state: Link) -> Any:
        if not entered.is_set():
            entered.set()
            assert go.wait(60)
        return door.link.push(request, state)

    push = limited(slow, MOST, door.ledger, Refusals())
    first = threading.Thread(target=push, kwargs={"request": pushed(tree("m")), "state": door.link})
    first.start()
    try:
        assert entered.wait(60)
        with pytest.raises(HTTPException) as refusal:
            push(request=pushed(tree("n"), node=2), state=door.link)
        assert refusal.value.status_code == 503
    finally:
        go.set()
        first.join()
    push(request=pushed(tree("n"), node=2), state=door.link)
    assert door.link.pushes == 2


def test_free_bytes_are_those_of_the_databases_disk(tmp_path: Path) -> None:
    assert free_bytes(SimpleNamespace()) is None
    assert free_bytes(SimpleNamespace(database_url="sqlite:///:memory:")) is None
    assert free_bytes(SimpleNamespace(database_url="postgresql://host/name")) is None
    assert (free_bytes(SimpleNamespace(database_url=f"sqlite:///{tmp_path}/state.db")) or 0) > 0
