"""The recorded steps of a process: found again by what visits have in common, and given up where they do not work."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from logging import WARNING
from typing import Any, Generic, Protocol, TypeVar

import torch
from flwr.common.logger import log
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from fedcross.client.cuda_graphs import Record, Replay
from fedcross.client.cuda_recorder import WARM_UP, cause
from fedcross.client.device import out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.parts.objective import Objective, Prepared

#: Most recordings in a process; the one used longest ago makes room. A run has one or two, more where the number of
#: clients that train together changes.
MOST = 8
#: As many recordings as this count for one that was made because an attribute has changed between two visits: a method
#: that changes one at every visit has MOST recordings before it has none.
CHANGE = 3
#: What may be in the tree of prepared values: tensors are copied, other values compared.
PLAIN = (Tensor, bool, int, float, str, type(None))


class Stage(Protocol):
    """Tensors in fixed places, and the recorded step that works on them."""

    replay: Replay
    #: How many times it was used.
    uses: int


S = TypeVar("S", bound=Stage)
#: What visits must have in common, and how many of them train together.
Key = tuple[Hashable, int]


class Recordings(Generic[S]):
    """Stages by key, at most :data:`MOST` of them.

    Attributes
    ----------
    refused : str or None
        Why nothing is recorded any more; None while steps are recorded.
    why : str
        What is known of that beside the reason (:attr:`client.cuda_graphs.Replay.why`).
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self.why = ""
        self._stages: dict[Key, S] = {}  # in the order of their last use
        self._seen: Counter[Hashable] = Counter()  # kind -> visits or groups of visits
        self._balance = 0  # recordings made, minus those found again
        self._replays = 0  # of stages that are gone

    @property
    def replays(self) -> int:
        """How many steps were repeated without Python."""
        return self._replays + sum(stage.replay.replays for stage in self._stages.values())

    def take(
        self, key: Callable[[], Key], prepared: Prepared, fits: Callable[[S], bool], make: Callable[[], S]
    ) -> S | None:
        """Return the stage of `key`, a new one if none `fits`; None if steps are not recorded.

        Raises
        ------
        torch.OutOfMemoryError
            If the device has no room for a new stage, even without all others.
        """
        if self.refused is not None:
            return None
        odd = {type(leaf).__name__ for leaf in tree_leaves(prepared) if not isinstance(leaf, PLAIN)}
        if odd:
            self.refuse(f"what the method prepares holds a {min(odd)}, whose contents cannot be compared")
            return None
        name = key()
        found = self._stages.pop(name, None)
        changed = "" if found is None else found.replay.outdated()
        if found is not None and (changed or not fits(found)):
            self._release(found)
            found = None
        self._balance += CHANGE if changed else 1 if found is None else -min(self._balance, 1)
        if found is None and (reason := self._hopeless(name[0], changed)):
            self.refuse(reason)
            return None
        found = self._stages[name] = found or self._made(make)
        self._seen[name[0]] += 1
        found.uses += 1
        if found.uses & (found.uses - 1) == 0:  # at uses 1, 2, 4, 8, ...
            found.replay.doubt()  # what a method keeps elsewhere than in attributes would stay as it was recorded
        return found

    def _hopeless(self, kind: Hashable, changed: str) -> str:
        """Return why another recording, for visits of `kind`, would not be used again; empty if it may be.

        `changed` names what made the last one useless, if anything did.
        """
        if not self._seen[kind] and list(self._seen.values()).count(1) >= MOST:
            return f"{MOST} recordings were not enough, what the method prepares differs from visit to visit"
        if self._balance > 3 * MOST:
            if changed:
                return f"{changed} is too often another one at the next visit"
            return f"{self._balance} more recordings were made than were used again"
        return ""

    def _made(self, make: Callable[[], S]) -> S:
        """Return a new stage; older ones make room for it where there are too many, or too little memory."""
        if len(self._stages) >= MOST:
            self._release(self._stages.pop(next(iter(self._stages))))
        if self._stages:
            with suppress(torch.OutOfMemoryError):
                return make()
            self.release_all()
        return make()

    def look_at(self, stage: S) -> None:
        """Record nothing any more if the steps of `stage`, which has just trained, were refused."""
        if stage.replay.refused is not None:
            self.refused, self.why = stage.replay.refused, stage.replay.why
            self.release_all()

    def give_up(self, stage: S, error: Exception) -> None:
        """Record nothing any more after the `error` of a step of `stage`; other loops may do better."""
        if out_of_memory(error):
            self.refuse("the device's memory is too small for a recorded step")
        elif stage.replay.refused is not None:
            self.look_at(stage)
        else:
            self.refuse(f"a step fails where it is to be recorded ({cause(error)})")

    def refuse(self, reason: str) -> None:
        """Leave everything to the plain loops, and give the memory of the stages back."""
        self.refused, self.why = reason, "" if sys.exc_info()[0] is None else traceback.format_exc()
        self.release_all()
        log(WARNING, "fedcross: CUDA graphs are not used: %s. Training goes on without them.", reason)

    def release_all(self) -> bool:
        """Give the memory of all stages back; return whether there were any."""
        stages = list(self._stages.values())
        self._stages.clear()
        for stage in stages:
            self._release(stage)
        return bool(stages)

    def _release(self, stage: S) -> None:
        self._replays += stage.replay.replays
        stage.replay.release()


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

    @property
    def why(self) -> str:
        """What is known of `refused` beside the reason: the error's traceback, or how far results were apart."""
        return self._recordings.why

    @property
    def replays(self) -> int:
        """How many steps were repeated without Python."""
        return self._recordings.replays

    def _records(self, prepared: Prepared) -> bool:
        """Return whether steps are recorded: the method has to allow it, and `prepared` be no part of the model."""
        if self.refused is None and (reason := self._objective.unrecorded or _live(prepared, self._net)):
            self._recordings.refuse(reason)
        return self.refused is None

    def release(self) -> None:
        """Give the memory of all recordings back; the next visit records anew."""
        self._recordings.release_all()


def steps(examples: int, size: int, epochs: int) -> int:
    """Return the number of steps of a visit with batches of `size`."""
    return epochs * -(-examples // size)


def rows_of_plan(examples: int, size: int, epochs: int) -> int:
    """Return how many rows the plan of a recorded visit has: its steps, and those that a warm-up looks up beyond them.

    The step's number grows with each call, so a warm-up and the recording read as many rows as they make calls; what
    they compute is undone.
    """
    return max(steps(examples, size, epochs), WARM_UP + 1)


def _live(prepared: Prepared, net: ModuleNet) -> str:
    """Return why a recording, which reads copies of prepared tensors, would train otherwise; empty if it would not.

    A loss may have a gradient through a prepared tensor, or see the steps that the model takes.
    """
    place = net.flat.untyped_storage().data_ptr()  # 0 where a tensor has no memory of its own
    for leaf in tree_leaves(prepared):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.requires_grad:
            return "what the method prepares requires a gradient; return it with .detach()"
        if place and leaf.untyped_storage().data_ptr() == place:
            return "what the method prepares is part of the model that trains; return it with .clone()"
    return ""


def kinds_of(prepared: Prepared, by_row: frozenset[str]) -> Hashable:
    """Return what a step's Python code can see of prepared values: structure, constants, shapes and types of tensors.

    The tensors that `by_row` names may have any number of rows.
    """
    leaves, spec = tree_flatten_with_path(prepared)
    return str(spec), tuple(_leaf_kind(leaf, rows=is_by_row(path, by_row)) for path, leaf in leaves)


def _leaf_kind(leaf: Any, *, rows: bool) -> Hashable:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return ("rows", leaf.dim(), leaf.shape[1:], leaf.dtype) if rows else (leaf.shape, leaf.dtype)


def is_by_row(path: tuple[Any, ...], by_row: frozenset[str]) -> bool:
    """Return whether the prepared value at `path` is one that `by_row` names."""
    return bool(path) and getattr(path[0], "key", None) in by_row
