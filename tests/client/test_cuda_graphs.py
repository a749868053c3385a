"""Replay without a GPU: the recorder is a stand-in that, like a CUDA graph, repeats the call on fixed inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcross.client.cuda_graphs import Replay
from tests.support.emulated_gpu import Recorder


class Summing:
    """A step that adds its number and its inputs to a state."""

    def __init__(self) -> None:
        self.state = torch.zeros(2)

    def __call__(self, number: Tensor, x: Tensor) -> None:
        self.state += x.sum() + number


class Counting:
    """A step that adds a Python number, which a graph would keep."""

    def __init__(self) -> None:
        self.state = torch.zeros(2)
        self.frozen: int | None = None
        self.calls = 0

    def __call__(self, number: Tensor, x: Tensor) -> None:
        self.state += self.frozen if self.frozen is not None else self.calls
        self.calls += 1


def test_gives_what_calling_gives_and_records_once_per_shape() -> None:
    step, recorder = Summing(), Recorder()
    replay = Replay(step, [step.state], recorder)
    inputs = [torch.full((3,), float(i)) for i in range(5)] + [torch.ones(2) for _ in range(3)]
    for number, x in enumerate(inputs):
        replay(torch.tensor(number), x)
    assert step.state.tolist() == [64.0, 64.0]  # 3 (0+1+2+3+4) + 3 * 2, and the numbers 0 to 7
    assert replay.refused is None
    assert recorder.replays == 6  # 5 - 1 of the first shape, 3 - 1 of the second; each first one records


def test_a_step_that_depends_on_a_python_number_is_found_out() -> None:
    step = Counting()

    def record(call: Callable[[], None]) -> Callable[[], None]:
        call()

        def replay() -> None:
            step.frozen = 0
            call()
            step.frozen, step.calls = None, step.calls - 1

        return replay

    frozen = Replay(step, [step.state], record)
    for number in range(4):
        frozen(torch.tensor(number), torch.zeros(1))
    assert frozen.refused is not None
    assert "differs" in frozen.refused
    assert step.state.tolist() == [10.0, 10.0]  # 1 + 2 + 3 + 4, as without graphs; recording counted to 1


def test_a_step_that_cannot_be_recorded_is_called() -> None:
    def refuse(call: Callable[[], None]) -> Callable[[], None]:
        call()  # a recording that fails half-way has changed the state
        raise RuntimeError("operation not permitted when stream is capturing")

    step = Summing()
    replay = Replay(step, [step.state], refuse)
    for number in range(3):
        replay(torch.tensor(number), torch.ones(1))
    assert step.state.tolist() == [6.0, 6.0]  # 3 * 1, and the numbers 0 to 2
    assert replay.refused is not None
    assert "cannot be recorded" in replay.refused


def test_a_state_that_diverges_is_no_difference() -> None:
    def step(state: Tensor) -> None:
        state.mul_(1e30)

    state, recorder = torch.tensor([1.0, 1e30]), Recorder()
    replay = Replay(lambda: step(state), [state], recorder)
    for _ in range(4):
        replay()
    assert state.isinf().all()
    assert replay.refused is None
