"""The recorded steps of a process: found again by what visits have in common, and given up where they do not work."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from logging import WARNING
from typing import Generic, Protocol, TypeVar

import torch
from flwr.common.logger import log
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedcross.client.cuda_graphs import WARM_UP, Record, Replay
from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.parts.objective import Objective, Prepared

#: Most recordings in a process. A run has one or two; more mean that every visit prepares something of another kind.
MOST = 8
#: What may be in the tree of prepared values: tensors are copied, other values compared.
PLAIN = (Tensor, bool, int, float, str, type(None))


class Stage(Protocol):
    """Tensors in fixed places, and the recorded step that works on them."""

    replay: Replay
    #: How many times it was used.
    uses: int


S = TypeVar("S", bound=Stage)


class Recordings(Generic[S]):
    """Stages by key.

    Attributes
    ----------
    refused : str or None
        Why nothing is recorded any more; None while steps are recorded.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._stages: dict[Hashable, S] = {}
        self._made = 0

    def take(
        self, key: Callable[[], Hashable], prepared: Prepared, fits: Callable[[S], bool], make: Callable[[], S]
    ) -> S | None:
        """Return the stage of `key`, a new one if none `fits`; None if steps are not recorded."""
        if self.refused is not None:
            return None
        odd = {type(leaf).__name__ for leaf in tree_leaves(prepared) if not isinstance(leaf, PLAIN)}
        if odd:
            self._refuse(f"what the method prepares holds a {min(odd)}, whose contents cannot be compared")
            return None
        name = key()
        found = self._stages.get(name)
        if found is None or not fits(found):
            if self._made >= MOST:
                self._refuse(f"{MOST} recordings were not enough, what the method prepares differs from visit to visit")
                return None
            self._made += 1
            try:
                found = self._stages[name] = make()
            except torch.OutOfMemoryError:
                self._refuse("the device's memory is too small for a copy of the clients' data")
                return None
        found.uses += 1
        if found.uses & (found.uses - 1) == 0:  # at uses 1, 2, 4, 8, ...
            found.replay.doubt()  # what a method keeps in attributes of its own would stay as it was recorded
        return found

    def look_at(self, stage: S) -> None:
        """Record nothing any more if the steps of `stage`, which has just trained, were refused."""
        if stage.replay.refused is not None:
            self.refused = stage.replay.refused
            self._stages.clear()

    def _refuse(self, reason: str) -> None:
        """Leave everything to the plain loops, and give the memory of the stages back."""
        self.refused = reason
        self._stages.clear()
        log(WARNING, "fedcross: CUDA graphs are not used: %s. Training goes on without them.", reason)


class Recorder(Generic[S]):
    """Base of what trains visits with recorded steps.

    Parameters
    ----------
    net : ModuleNet
        The model; all visits use this one.
    objective : Objective
        The method's client half.
    examples : int
        Examples of the largest client, so that one recording has room for all. For a larger client there is a new one.
    record : callable, optional
        Takes the place of recording a CUDA graph (:class:`client.cuda_graphs.Replay`), on any device.
    """

    def __init__(self, net: ModuleNet, objective: Objective, examples: int = 0, record: Record | None = None) -> None:
        self._net, self._objective, self._examples, self._record = net, objective, examples, record
        self._recordings: Recordings[S] = Recordings()

    @property
    def refused(self) -> str | None:
        """Why steps are not recorded; None while they are."""
        return self._recordings.refused


def steps(examples: int, size: int, epochs: int) -> int:
    """Return the number of steps of a visit with batches of `size`."""
    return epochs * -(-examples // size)


def rows_of_plan(examples: int, size: int, epochs: int) -> int:
    """Return how many rows the plan of a recorded visit has: its steps, and those that a warm-up looks up beyond them.

    The step's number grows with each call, so a warm-up and the recording read as many rows as they make calls; what
    they compute is undone.
    """
    return max(steps(examples, size, epochs), WARM_UP + 1)
