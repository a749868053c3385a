"""Which objects of announced replies the SuperLink stores."""

from __future__ import annotations

import pytest

from fedcross.engines.executor.ledger import SPARE
from tests.support.fleet_door import NODE
from tests.support.metered_door import QUOTA, MeteredDoor
from tests.support.trees import name, tree


def test_what_a_device_stores_is_bounded_until_it_is_deleted(caplog: pytest.LogCaptureFixture) -> None:
    door = MeteredDoor()
    assert door.announce(tree("m", tree("a"))) == 200
    assert door.announce(tree("n", tree("b"), tree("c"))) == 200
    assert [door.put(one, QUOTA // 2) for one in "abc"] == [200, 200, 413]
    assert f"refused an object of node {NODE}: more than" in caplog.text
    assert door.link.object_store.get(name("c")) is None  # n cannot be completed: the server gets an error instead
    [error] = door.link.errors
    assert "FEDCROSS_REPLY_MIB" in str(error.error.reason)
    assert door.announce(tree("o", tree("e")), node=2) == 200
    assert door.put("e", QUOTA, node=2) == 200  # another device's
    assert door.announce(tree("p", tree("d"), tree("f"))) == 200
    assert door.put("d", QUOTA // 2) == 200
    door.link.object_store.delete(name("m"))  # the server has it
    assert door.put("f", QUOTA // 2) == 200


def test_a_reply_that_is_announced_again_keeps_its_weight() -> None:
    door = MeteredDoor()
    made = tree("m", tree("a"), tree("b"))
    assert door.announce(made) == 200
    assert door.put("a", QUOTA) == 200
    assert door.announce(made) == 200
    assert door.put("b", 1) == 413


def test_the_disk_is_not_filled() -> None:
    door = MeteredDoor(free=SPARE + 10)
    assert door.announce(tree("m", tree("a"))) == 200
    assert door.put("a", 11) == 503
    assert door.put("a", 10) == 200
