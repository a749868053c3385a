"""Replay without a GPU: the recorder is a stand-in that, like a CUDA graph, repeats the call on fixed inputs."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from fedcross.client import cuda_graphs, cuda_recorder, graph_memory
from fedcross.client.cuda_graphs import Replay
from fedcross.client.cuda_recorder import WARM_UP, record_cuda
from fedcross.client.graph_memory import give_back, kept_by_graphs
from tests.support.tape import Recorder


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
    assert "tensor 0 of the state (2,) torch.float32" in frozen.why
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
    assert replay.why.startswith("Traceback")
    assert "in refuse" in replay.why


def test_a_state_that_diverges_is_no_difference() -> None:
    def step(state: Tensor) -> None:
        state.mul_(1e30)

    state, recorder = torch.tensor([1.0, 1e30]), Recorder()
    replay = Replay(lambda: step(state), [state], recorder)
    for _ in range(4):
        replay()
    assert state.isinf().all()
    assert replay.refused is None


def test_too_little_memory_for_a_recording_is_told_to_a_caller_that_can_do_with_less() -> None:
    def full(call: Callable[[], None]) -> Callable[[], None]:
        call()
        raise torch.OutOfMemoryError("CUDA out of memory")

    step = Summing()
    less = Replay(step, [step.state], full, fewer=True)
    with pytest.raises(torch.OutOfMemoryError):
        less(torch.tensor(1), torch.ones(1))
    assert step.state.tolist() == [0.0, 0.0]
    other = Replay(step, [step.state], full)
    other(torch.tensor(1), torch.ones(1))
    assert step.state.tolist() == [2.0, 2.0]
    assert other.refused == "a step cannot be recorded (CUDA out of memory)"


class Driver:
    """Emulates what recording needs of ``torch.cuda``: a graph of 3 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.replays, self.waits, self.modes = 5 * 2**30, 0, 0, ["default"]
        self.freed: list[Any] = []
        driver = self

        class Graph:
            def replay(self) -> None:
                driver.replays += 1

            def reset(self) -> None:
                driver.freed.append(self)

        class Stream:
            def __init__(self, device: int = 0) -> None: ...

            def wait_stream(self, other: Any) -> None:
                driver.waits += 1

        stubs: dict[str, Any] = {
            "current_stream": lambda: Stream(),
            "Stream": Stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": Graph,
            "graph": lambda _, **__: nullcontext(),
            "memory_reserved": lambda: self.reserved,
            "current_device": lambda: 1,
            "get_sync_debug_mode": lambda: self.modes[-1],
            "set_sync_debug_mode": self.modes.append,
        }
        for name, value in stubs.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda_recorder, "failed", [])
        monkeypatch.setattr(graph_memory, "_streams", defaultdict(list))
        monkeypatch.setattr(graph_memory, "_lost", Counter())


def test_a_graph_counts_the_memory_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, modes = Driver(monkeypatch), []

    def call() -> None:
        modes.append(driver.modes[-1])
        if len(modes) > WARM_UP:  # while recording
            driver.reserved += 3 * 2**30

    gc.collect()
    before = kept_by_graphs(torch.device("cuda:1"))
    replay = record_cuda(call)
    replay()
    assert driver.replays == 1
    assert modes == ["default", "default", "error", "default"]  # what waits is found before the recording, not in it
    assert kept_by_graphs(torch.device("cuda:1")) - before == 3 * 2**30
    assert kept_by_graphs(torch.device("cuda:0")) == 0
    del replay
    assert kept_by_graphs(torch.device("cuda:1")) == before


def test_a_step_that_works_on_the_host_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would end a recording half-way, after which torch's allocator does not recover."""
    driver = Driver(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: pytest.fail("a recording began"))
    count = torch.zeros(())
    with pytest.raises(RuntimeError, match="computes with a tensor on the CPU"):
        record_cuda(lambda: count.add_(1) and None)
    assert driver.waits == 2  # the caller's stream goes on after what was begun, also after an error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: x"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_a_failed_recording_reserved_is_not_free(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Torch keeps it until the process ends, unless memory alone was too small."""
    driver, calls = Driver(monkeypatch), []

    def call() -> None:
        calls.append(1)
        if len(calls) > WARM_UP:  # while recording
            driver.reserved += 2**30
            raise error

    before = kept_by_graphs(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="CUDA"):
        record_cuda(call)
    lost = 0 if isinstance(error, torch.OutOfMemoryError) else 2**30
    assert kept_by_graphs(torch.device("cuda:1")) - before == lost
    assert kept_by_graphs(torch.device("cuda:0")) == 0


@contextmanager
def ending_badly(*_: Any, **__: Any) -> Iterator[None]:
    """Do what torch does after an error while it records: the end of the recording raises another one."""
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_failed_recording_names_its_cause_and_is_the_last_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", ending_badly)
    calls: list[bool] = []

    def waiting() -> None:
        calls.append(gc.isenabled())
        if len(calls) == WARM_UP + 1:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    one = Replay(waiting, [])
    one()
    reason = "CUDA error: operation not permitted when stream is capturing"
    assert one.refused == f"a step cannot be recorded ({reason})"
    assert "in waiting" in one.why
    assert "due to a previous error" in one.why
    assert calls == [True] * WARM_UP + [False, True]  # no garbage is collected while recording
    assert cuda_recorder.failed == [reason]
    other = Replay(waiting, [])
    other()
    assert other.refused == f"a step cannot be recorded (an earlier recording failed: {reason})"


def test_a_recording_has_a_stream_of_its_own_as_long_as_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch free cuBLAS's memory of a stream with one of its graphs; of streams there are few."""
    driver, captured = Driver(monkeypatch), list[Any]()
    warm: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: warm.append(stream) or nullcontext())
    monkeypatch.setattr(
        torch.cuda, "graph", lambda _, stream, capture_error_mode: captured.append(stream) or nullcontext()
    )
    one, other = record_cuda(lambda: None), record_cuda(lambda: None)
    assert warm == captured == [one.stream, other.stream]
    assert one.stream is not other.stream
    graph, stream = one.graph, one.stream
    del one
    assert driver.freed == [graph]  # before its stream is free
    assert record_cuda(lambda: None).stream is stream
    with pytest.raises(RuntimeError, match="no"):
        record_cuda(raising)
    gc.collect()
    assert graph_memory._streams[torch.device("cuda:1")] == [stream]
    assert other.stream is captured[1]


def test_cublas_gives_its_memory_back_once_no_recording_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB and more for each stream; after a recording that found too little, the plain loop needs them."""
    Driver(monkeypatch)
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("cuBLAS"))
    monkeypatch.setattr(graph_memory, "_alive", WeakSet())
    one = record_cuda(lambda: None)
    give_back(torch.device("cuda:1"))
    assert calls == ["cache"]  # the graph has the place of cuBLAS's memory
    one.graph.reset()
    del one
    give_back(torch.device("cuda:1"))
    assert calls == ["cache", "cuBLAS", "cache"]
    give_back(torch.device("cpu"))
    assert len(calls) == 3


def raising() -> None:
    raise RuntimeError("no")


def test_other_threads_may_use_the_gpu_during_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that writes a log does: by default CUDA would end the recording."""
    Driver(monkeypatch)
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda _, **how: modes.append(how) or nullcontext())
    made = record_cuda(lambda: None)
    assert modes == [{"stream": made.stream, "capture_error_mode": "thread_local"}]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_without_room_beside_its_recording_is_called_without_it(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """At its first call, or at the comparison: the visit goes on."""
    graphs: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "give_back", lambda _: graphs.append("emptied"))

    class Graph:
        def __call__(self) -> None:
            step.add(torch.tensor(number), torch.ones(1))

    class Large(Summing):
        def __call__(self, number: Tensor, x: Tensor) -> None:
            self.add(number, x)
            if alive() is not None and int(number) == late:
                raise torch.OutOfMemoryError("CUDA out of memory")

        def add(self, number: Tensor, x: Tensor) -> None:
            Summing.__call__(self, number, x)

    def record(call: Callable[[], None]) -> Callable[[], None]:
        nonlocal alive
        call()
        made = Graph()
        alive = weakref.ref(made)
        return made

    alive: Callable[[], Graph | None] = lambda: None  # noqa: E731
    step, number = Large(), 0
    replay = Replay(step, [step.state], record)
    for number in range(3):
        replay(torch.tensor(number), torch.ones(1))
    assert step.state.tolist() == [6.0, 6.0]
    assert replay.refused == "the device's memory is too small for a step and its recording"
    assert graphs == ["emptied"]
    assert alive() is None
