"""Replay without a GPU: the recorder is a stand-in that, like a CUDA graph, repeats the call on fixed inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcross.client.batched.cuda_graphs import Replay


class Summing:
    """A step that adds its inputs (and, if asked, its number) to a state."""

    def __init__(self, *, counts: bool = False) -> None:
        self.state = torch.zeros(2)
        self.counts = counts
        self.calls = 0

    def __call__(self, number: int, x: Tensor) -> None:
        self.calls += 1
        self.state += x.sum() + (number if self.counts else 0)


class Recorder:
    """Runs the call once, as recording does, and hands out what repeats it."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        call()

        def replay() -> None:
            self.replays += 1
            call()

        return replay


def test_gives_what_calling_gives_and_records_once_per_shape() -> None:
    step, recorder = Summing(), Recorder()
    replay = Replay(step, [step.state], recorder)
    inputs = [torch.full((3,), float(i)) for i in range(5)] + [torch.ones(2) for _ in range(3)]
    for number, x in enumerate(inputs):
        replay(number, x)
    assert step.state.tolist() == [36.0, 36.0]  # 3 (0+1+2+3+4) + 3 * 2
    assert replay.refused is None
    assert recorder.replays == 6  # 5 - 1 of the first shape, 3 - 1 of the second; each first one records


def test_a_step_that_depends_on_its_number_is_found_out() -> None:
    step = Summing(counts=True)
    frozen = Replay(step, [step.state], Recorder())
    for number in range(4):
        frozen(number, torch.zeros(1))
    assert frozen.refused is not None
    assert "differs" in frozen.refused
    assert step.state.tolist() == [6.0, 6.0]  # 0 + 1 + 2 + 3, as without graphs


def test_a_step_that_cannot_be_recorded_is_called() -> None:
    def refuse(call: Callable[[], None]) -> Callable[[], None]:
        call()  # a recording that fails half-way has changed the state
        raise RuntimeError("operation not permitted when stream is capturing")

    step = Summing()
    replay = Replay(step, [step.state], refuse)
    for number in range(3):
        replay(number, torch.ones(1))
    assert step.state.tolist() == [3.0, 3.0]
    assert replay.refused is not None
    assert "cannot be recorded" in replay.refused
