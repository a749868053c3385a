"""A training step recorded once as a CUDA graph and replayed: the GPU no longer waits for Python.

A step works in place on fixed tensors and takes inputs of a fixed shape. One graph is recorded per shape of inputs. The
second step of each shape is done both ways and compared; if the graph differs, or cannot be recorded, steps are called
as they are and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor

#: A step replayed and a step called may differ by the order of the GPU's sums, not by more.
TOLERANCE = 1e-3
_WARM_UP = 3

Step = Callable[..., None]
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass
class _Recorded:
    inputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    checked: bool = False


class Replay:
    """Calls `step(number, *inputs)` by graph where that is possible.

    Parameters
    ----------
    step : callable
        Works in place on `state`. Its first argument, the step's number, is frozen into a graph.
    state : sequence of Tensor
        All that a step changes.
    record : callable, optional
        ``record(call)`` runs `call` once while recording, and returns what repeats it; CUDA graphs unless given.
    """

    def __init__(self, step: Step, state: Sequence[Tensor], record: Record | None = None) -> None:
        self._step = step
        self._state = list(state)
        self._record = record or record_cuda
        self._recorded: dict[Any, _Recorded] = {}
        #: Why steps are called as they are; None while graphs work.
        self.refused: str | None = None

    def __call__(self, number: int, *inputs: Tensor) -> None:
        """Do one step."""
        if self.refused is not None:
            self._step(number, *inputs)
            return
        shapes = tuple(tensor.shape for tensor in inputs)
        known = self._recorded.get(shapes)
        if known is None:
            self._begin(shapes, number, inputs)
        elif not known.checked:
            self._check(known, number, inputs)
        else:
            self._repeat(known, inputs)

    def _begin(self, shapes: Any, number: int, inputs: tuple[Tensor, ...]) -> None:
        """Record a graph for these shapes, then do the step itself without it."""
        before = [tensor.clone() for tensor in self._state]
        own = tuple(tensor.clone() for tensor in inputs)
        try:
            self._recorded[shapes] = _Recorded(own, self._record(lambda: self._step(number, *own)))
        except RuntimeError as error:
            self._refuse(f"a step cannot be recorded ({str(error).splitlines()[0]})")
        self._restore(before)
        self._step(number, *inputs)

    def _check(self, known: _Recorded, number: int, inputs: tuple[Tensor, ...]) -> None:
        """Do the step both ways; trust the graph from now on only if they agree. The called one counts."""
        before = [tensor.clone() for tensor in self._state]
        self._repeat(known, inputs)
        replayed = [tensor.clone() for tensor in self._state]
        self._restore(before)
        self._step(number, *inputs)
        for a, b in zip(replayed, self._state):
            if not torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                self._refuse("a replayed step differs from a called one")
                return
        known.checked = True

    def _repeat(self, known: _Recorded, inputs: tuple[Tensor, ...]) -> None:
        for fixed, given in zip(known.inputs, inputs):
            fixed.copy_(given)
        known.replay()

    def _restore(self, before: Sequence[Tensor]) -> None:
        for tensor, old in zip(self._state, before):
            tensor.copy_(old)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log(WARNING, "fedcross: CUDA graphs are not used, %s. Training goes on without them.", reason)


def record_cuda(call: Callable[[], None]) -> Callable[[], None]:
    """Record `call` as a CUDA graph, after a few calls beside the main stream as CUDA asks for."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
