"""Records a call as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fedcross.client.device import out_of_memory
from fedcross.client.graph_memory import Graph, lose
from fedcross.client.host_work import NoHostWork, no_waiting

#: Calls before a recording.
WARM_UP = 3

#: Why a recording failed in this process, after its warm-up; empty if none did.
failed: list[str] = []


def record_cuda(call: Callable[[], None]) -> Graph:
    """Record `call` as a CUDA graph, after a few warm-up calls on the same side stream, which CUDA requires.

    The last of them finds out what cannot be recorded (:mod:`client.host_work`). An error inside the recording leaves
    torch's allocator in doubt, so this process records nothing any more after it.

    Raises
    ------
    RuntimeError
        If `call` cannot be recorded, or an earlier recording failed.
    """
    if failed:
        raise RuntimeError(f"an earlier recording failed: {failed[0]}")
    made = Graph(torch.device("cuda", torch.cuda.current_device()))
    here = torch.cuda.current_stream()
    made.stream.wait_stream(here)
    try:
        with torch.cuda.stream(made.stream):
            for _ in range(WARM_UP - 1):
                call()
            with no_waiting(), NoHostWork():
                call()
    finally:  # also after an error: what was begun must not overtake what the caller writes next
        here.wait_stream(made.stream)
    with _no_garbage():
        _record(made, call)
    return made


def _record(made: Graph, call: Callable[[], None]) -> None:
    """Record `call`. What another thread of the process does with CUDA meanwhile, as a logger may, is its own affair.

    torch's threads of the backward pass belong to the recording by their stream. What would wait in one was refused in
    the warm-up.
    """
    before = torch.cuda.memory_reserved()
    try:
        with torch.cuda.graph(made.graph, stream=made.stream, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved()  # torch's cache is empty now: what it reserves is the graph's own
            call()
            made.nbytes = max(torch.cuda.memory_reserved() - before, 0)
    except RuntimeError as error:
        if not out_of_memory(error):
            failed.append(cause(error))
            lose(made.device, torch.cuda.memory_reserved() - before)
        raise


def cause(error: BaseException) -> str:
    """Return the first line of the error that came first: CUDA ends a broken recording with an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage before the block and none inside: a graph that goes while another is recorded ends that one."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
