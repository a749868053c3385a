"""Which recordings a process keeps, and when it gives up."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from fedcross.client.cuda_graphs import Replay
from fedcross.client.recordings import MOST, Recordings


class Place:
    """A stage with a tensor, and a step that refers to it as those of the trainers do."""

    def __init__(self) -> None:
        self.uses = 0
        self.held = torch.zeros(2)
        self.replay = Replay(lambda: self.step(), [self.held], lambda call: call)

    def step(self) -> None:
        self.held += 1


def take(recordings: Recordings[Place], kind: Any, size: int = 1, *, fits: bool = True) -> Place | None:
    return recordings.take(lambda: (kind, size), {}, lambda _: fits, Place)


def test_the_recording_used_longest_ago_makes_room() -> None:
    """As many clients as there are numbers up to twelve, in turn: more recordings than there is room for."""
    recordings: Recordings[Place] = Recordings()
    first = take(recordings, "round", 1)
    for size in range(2, MOST + 1):
        take(recordings, "round", size)
    assert take(recordings, "round", 1) is first
    for size in range(MOST + 1, 2 * MOST):  # as many others as there is room for beside the first
        assert take(recordings, "round", size) is not None
    assert take(recordings, "round", 1) is first
    assert len(recordings._stages) == MOST
    assert recordings.refused is None
    again = take(recordings, "round", 2)
    assert again is not None
    assert again.uses == 1


def test_what_differs_from_visit_to_visit_is_given_up_soon() -> None:
    recordings: Recordings[Place] = Recordings()
    for number in range(MOST):
        assert take(recordings, number) is not None
    assert take(recordings, MOST) is None
    assert "differs from visit to visit" in str(recordings.refused)
    assert recordings._stages == {}


def test_more_kinds_in_turn_than_there_is_room_for_are_given_up() -> None:
    """Each is recorded again whenever it comes, because the others took its place."""
    recordings: Recordings[Place] = Recordings()
    made = 0
    for number in range(100):
        made += take(recordings, "round", number % (MOST + 1)) is not None
    assert "more recordings were made than were used again" in str(recordings.refused)
    assert MOST < made <= 4 * MOST


def test_an_older_recording_gives_its_memory_back_at_once() -> None:
    recordings: Recordings[Place] = Recordings()
    stage = take(recordings, "round", 0)
    assert stage is not None
    for _ in range(3):
        stage.replay()
    held = weakref.ref(stage.held)
    del stage
    gc.disable()
    try:
        for size in range(1, MOST + 1):
            take(recordings, "round", size)
        assert held() is None
    finally:
        gc.enable()
    assert recordings.replays == 2  # the first step was called; what the stage did before it went is not forgotten


def test_one_that_is_too_small_is_replaced() -> None:
    recordings: Recordings[Place] = Recordings()
    first = take(recordings, "round")
    second = take(recordings, "round", fits=False)
    assert second is not first
    assert list(recordings._stages.values()) == [second]


def test_older_recordings_make_room_where_memory_is_short() -> None:
    recordings: Recordings[Place] = Recordings()
    take(recordings, "round", 3)
    tried = []

    def make() -> Place:
        tried.append(len(recordings._stages))
        if recordings._stages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Place()

    assert recordings.take(lambda: ("round", 4), {}, lambda _: True, make) is not None
    assert tried == [1, 0]
    recordings.release_all()
    with pytest.raises(torch.OutOfMemoryError):
        recordings.take(lambda: ("round", 5), {}, lambda _: True, lambda: _full())


def _full() -> Place:
    raise torch.OutOfMemoryError("CUDA out of memory")
