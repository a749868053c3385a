from __future__ import annotations

from fedcross.engines.lost_nodes import LOOK_S, MOST, LostNodes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_two_looks_miss_is_lost_and_a_blink_is_not() -> None:
    clock, there, looks = Clock(), {1, 2, 3}, []

    def nodes() -> set[int]:
        looks.append(clock.now)
        return set(there)

    lost = LostNodes(nodes, clock)
    lost.sent({"a": 1, "b": 2, "c": 3})

    def look() -> list[str]:
        clock.now += LOOK_S
        return lost.lost({"a", "b", "c"})

    assert look() == []
    there -= {2}
    assert look() == []
    there |= {2}
    assert look() == []  # it was back in time
    there -= {1}
    assert look() == []
    assert lost.lost({"a", "b", "c"}) == []  # too early for another look
    assert look() == ["a"]
    assert look() == []  # told once
    assert looks == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0]


def test_requests_that_nobody_waits_for_are_not_looked_after() -> None:
    clock = Clock()
    lost = LostNodes(list, clock)
    lost.sent({"a": 1})
    for _ in range(3):
        clock.now += LOOK_S
        assert lost.lost(set()) == []
        assert lost.lost({"unknown"}) == []


def test_the_oldest_requests_are_forgotten() -> None:
    lost = LostNodes(list, Clock())
    lost.sent({str(i): i for i in range(MOST + 5)})
    assert len(lost._node_of) == MOST
    assert "4" not in lost._node_of
    assert "5" in lost._node_of
