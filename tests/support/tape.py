"""A CUDA graph without a GPU: the operations of one call, repeated on the same tensors.

As with a graph, Python does not run again: numbers that it computed stay as they were, and a tensor that was in another
place while recording is not found. What a graph cannot record (a number that Python reads) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedcross.client.cuda_recorder import WARM_UP
from tests.support.waits import waits


class Tape:
    """The recorded operations."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Append an operation that gave `out`."""
        if waits(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.calls.append((func, args, kwargs, out))

    def replay(self) -> None:
        """Repeat all operations; write results to where they were."""
        with torch._C._AutoDispatchBelowAutograd():  # where the operations were recorded
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(_several(out), _several(again), strict=True):
                    if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _several(out: Any) -> Any:
    """Return the results of an operation, one or several."""
    return out if isinstance(out, (list, tuple)) else (out,)


class _Listening(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._tape.add(func, args, kwargs or {}, out)
        return out


class Recorder:
    """Stands in for recording a CUDA graph: runs the call once and hands out what repeats it on the same tensors."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        call()

        def replay() -> None:
            self.replays += 1
            call()

        return replay


class TapeRecorder:
    """Stands in for recording a CUDA graph of tensors on the CPU."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        call()  # as the warm-up on a side stream
        tape = Tape()
        with _Listening(tape):
            call()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay


class WarmRecorder(TapeRecorder):
    """Makes as many calls before the recording as :func:`client.cuda_recorder.record_cuda` does."""

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        for _ in range(WARM_UP - 1):
            call()
        return super().__call__(call)
