"""Records a training step once as a CUDA graph and replays it, so that the GPU does not wait for Python.

A step works in place on fixed tensors and takes inputs of a fixed shape; each shape of inputs has its own graph. The
second step of each shape runs both with and without the graph. If the results differ, or if recording fails, a warning
is logged and all steps run without graphs. :meth:`Replay.doubt` asks for the comparison again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor

from fedcross.client.cuda_recorder import cause, record_cuda
from fedcross.client.device import out_of_memory
from fedcross.client.graph_memory import give_back
from fedcross.client.outside import Back, Outside, changed

#: Largest length of the difference between a replayed and a called step, as a share of what the step changes; the GPU
#: may sum in another order.
TOLERANCE = 1e-2
#: The same as a share of the values themselves, for tensors that a step hardly changes. Where nothing but weights
#: follows the gradient, at small rates, this would hide a wrong one, so a state without momentum has the gradient.
ROUNDING = 1e-6

Step = Callable[..., None]
Record = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass
class _Recorded:
    inputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    #: Names what the recording keeps and is another one now; empty if nothing is.
    other: Callable[[], str]
    checked: bool = False


class Replay:
    """Runs `step(*inputs)` as a CUDA graph where possible.

    Parameters
    ----------
    step : callable
        Works in place on `state`. A graph keeps every Python number of its recording, so what changes from step to
        step, the step's own number too, must be a tensor among the inputs.
    state : sequence of Tensor
        All tensors that a step changes.
    record : callable, optional
        ``record(call)`` runs `call` once while recording and returns a function that repeats it. Default: CUDA graphs.
    fewer : bool
        Whether the caller can do with less memory: a recording that finds too little raises its error and leaves
        `state` as it was. Otherwise the step is called from then on.
    outside : Outside, optional
        What a step must leave alone to be recorded.

    Attributes
    ----------
    refused : str or None
        Why steps run without graphs; None while graphs are in use.
    differs : bool
        Whether a comparison refused them. What its visit has changed outside is in doubt then, so that it has to begin
        anew (:meth:`keep`).
    why : str
        With `refused`, where it happened (the error's traceback), or how far a replayed step was from a called one.
    replays : int
        How many steps a graph has done.
    """

    def __init__(
        self,
        step: Step,
        state: Sequence[Tensor],
        record: Record | None = None,
        *,
        fewer: bool = False,
        outside: Outside | None = None,
    ) -> None:
        self._step = step
        self._outside = outside
        self._state = list(state)
        self._record = record or record_cuda
        self._fewer = fewer
        self._recorded: dict[Any, _Recorded] = {}
        self.refused: str | None = None
        self.differs = False
        self.why = ""
        self.replays = 0

    def __call__(self, *inputs: Tensor) -> None:
        """Do one step."""
        if self.refused is not None:
            self._step(*inputs)
            return
        shapes = tuple(tensor.shape for tensor in inputs)
        known = self._recorded.get(shapes)
        if known is None:
            self._begin(shapes, inputs)
        elif not known.checked:
            self._check(known, inputs)
        else:
            self._repeat(known, inputs)

    def _begin(self, shapes: Any, inputs: tuple[Tensor, ...]) -> None:
        """Record a graph for these shapes, then run the step without it."""
        before = [tensor.clone() for tensor in self._state]
        own = tuple(tensor.clone() for tensor in inputs)
        back = None
        try:
            back = None if self._outside is None else self._outside.keep()
            self._recorded[shapes] = _Recorded(own, self._recording(own, back), self._watch())
        except RuntimeError as error:
            if self._fewer and out_of_memory(error):
                self._restore(before)
                raise
            self._refuse(f"a step cannot be recorded ({cause(error)})", traceback.format_exc())
            if back is not None:
                back()
        self._restore(before)
        self._call(inputs, before)

    def _call(self, inputs: tuple[Tensor, ...], before: Sequence[Tensor]) -> None:
        """Run the step without a graph; if there is too little memory for it beside the graphs, do without them."""
        try:
            self._step(*inputs)
        except RuntimeError as error:
            if self._fewer or not self._recorded or not out_of_memory(error):
                raise
            self._refuse("the device's memory is too small for a step and its recording", traceback.format_exc())
        else:
            return
        # Outside of the handler, whose error keeps the tensors of the step.
        for known in self._recorded.values():
            known.replay = _released  # the caller may hold this one
        self._recorded.clear()
        give_back(before[0].device)
        self._restore(before)
        self._step(*inputs)

    def _recording(self, own: tuple[Tensor, ...], back: Back | None) -> Callable[[], None]:
        """Record a step on the inputs `own`; the last call, which is the recording, may change nothing outside."""
        if (outside := self._outside) is None or back is None:
            return self._record(lambda: self._step(*own))
        if found := outside.unseen():
            raise RuntimeError(found)

        def call() -> None:
            nonlocal found
            before = outside.marks()
            self._step(*own)
            found = changed(before, outside.marks())

        replay = self._record(call)
        if not found and back.in_secret():
            found = "the values of a tensor, by its .data"
        if found:
            raise RuntimeError(f"it changes what a recording would keep as it was: {found}")
        return replay

    def _watch(self) -> Callable[[], str]:
        return str if self._outside is None else self._outside.watch()

    def _check(self, known: _Recorded, inputs: tuple[Tensor, ...]) -> None:
        """Run the step with and without the graph; use the graph later only if both agree. Keep the other result."""
        before = [tensor.clone() for tensor in self._state]
        self._repeat(known, inputs)
        replayed = [tensor.clone() for tensor in self._state]
        self._restore(before)
        self._call(inputs, before)
        if self.refused is not None:
            return
        if all(map(_agree, before, replayed, self._state)):
            known.checked = True
        else:
            self.differs = True
            self._refuse("a replayed step differs from a called one", _differences(before, replayed, self._state))

    def keep(self) -> Back | None:
        """Return what puts back what the next steps change outside; None if no comparison comes."""
        if self.refused is not None or (self._recorded and all(known.checked for known in self._recorded.values())):
            return None
        return None if self._outside is None else self._outside.keep()

    def doubt(self) -> None:
        """Compare the next step of each shape with a called one again."""
        for known in self._recorded.values():
            known.checked = False

    def outdated(self) -> str:
        """Name what a recording keeps and was changed since between visits; empty if nothing was."""
        return next(filter(None, (known.other() for known in self._recorded.values())), "")

    def release(self) -> None:
        """Give the graphs and all tensors back at once; nothing can be done with this object any more.

        `step` usually belongs to the object that holds this one: without this, both wait for the garbage collector.
        """
        self._recorded.clear()
        self._state.clear()
        self._step, self._outside = _released, None

    def _repeat(self, known: _Recorded, inputs: tuple[Tensor, ...]) -> None:
        for fixed, given in zip(known.inputs, inputs):
            fixed.copy_(given)
        self.replays += 1
        known.replay()

    def _restore(self, before: Sequence[Tensor]) -> None:
        for tensor, old in zip(self._state, before):
            tensor.copy_(old)

    def _refuse(self, reason: str, why: str) -> None:
        self.refused, self.why = reason, why
        log(WARNING, "fedcross: CUDA graphs are not used: %s. Training goes on without them.", reason)


def _agree(before: Tensor, replayed: Tensor, called: Tensor) -> bool:
    """Return whether two results of a step that started from `before` are the same to rounding."""
    if not called.is_floating_point():
        return torch.equal(replayed, called)
    apart, change, size = _lengths(before, replayed, called)
    return apart <= TOLERANCE * change + ROUNDING * size


def _lengths(before: Tensor, replayed: Tensor, called: Tensor) -> tuple[float, ...]:
    """Return the length of the difference, of what the called step changes, and of its result."""
    both = (replayed.isnan() & called.isnan()) | (replayed.isinf() & (replayed == called))  # it diverges: the same way
    values = (replayed - called, called - before, called)
    return tuple(float(torch.where(both, 0, value).double().norm()) for value in values)


def _differences(before: Sequence[Tensor], replayed: Sequence[Tensor], called: Sequence[Tensor]) -> str:
    """Return a line for each tensor of the state in which a replayed step is not a called one."""
    found = []
    for place, (old, one, other) in enumerate(zip(before, replayed, called)):
        if not _agree(old, one, other):
            apart, change, size = _lengths(old.double(), one.double(), other.double())
            found.append(
                f"tensor {place} of the state {tuple(other.shape)} {other.dtype}: {apart:.3g} apart, "
                f"a step changes it by {change:.3g}, its length is {size:.3g}"
            )
    return "\n".join(found)


def _released(*_: Tensor) -> None:
    """Take the place of a step that was given back."""
    raise RuntimeError("this recording was given back")
