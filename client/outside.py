"""What a step could change beside its state: a recording keeps that as it was, and a comparison changes it once more.

Such are attributes of the method's objective and of the network's modules, prepared tensors, and the random numbers of
Python and numpy. A step that changes one of them is not recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedcross.client.attributes import PLAIN, Kept, Own, Same, children, iterator, mark, places_of, putting_back

#: Attributes of a module that hold what a step does change, or other modules.
_OWN = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
#: Attributes at which nobody looks between visits: those, and torch's own of every module.
_BETWEEN = _OWN | set(vars(nn.Module())) - {"training"}
#: Place -> what stands there, compared by value, or by identity for what has no plain value.
Marks = dict[str, Any]


class Outside:
    """What steps of one kind should leave alone.

    Parameters
    ----------
    objective : object
        The method's client half.
    module : nn.Module
        The network.
    prepared : iterable
        What the objective prepared; only tensors are looked at.
    """

    def __init__(self, objective: object, module: nn.Module, prepared: Iterable[Any]) -> None:
        self._tensors = [leaf for leaf in prepared if isinstance(leaf, Tensor)]
        self._held: dict[str, Tensor] = {}
        self._owners = {"the method": places_of(objective)}
        self._owners |= {f"layer {name or 'of all'}": places_of(part) for name, part in module.named_modules()}
        self._trained = dict(module.named_parameters())
        self._own = Own(module)
        for held, value in places_of(objective).items():
            if isinstance(value, nn.Module):
                others = [(name, part) for name, part in value.named_modules() if not self._own.has(part)]
                self._owners |= {f"the method's {'.'.join(filter(None, (held, n)))}": places_of(p) for n, p in others}
                tensors = (*value.named_parameters(held), *value.named_buffers(held))
                self._held |= {name: tensor for name, tensor in tensors if not self._own.has(tensor)}

    def unseen(self) -> str:
        """Return why steps cannot be recorded whatever they do; empty if they may be."""
        for owner, attributes in self._owners.items():
            for name, value in attributes.items():
                if name not in _OWN and (reason := _unseen(value, self._own)):
                    return f"attribute {name} of {owner} {reason}"
        return ""

    def marks(self) -> Marks:
        """Return how everything is now."""
        found: Marks = {f"prepared tensor {i}": Same(t, t._version) for i, t in enumerate(self._tensors)}
        found |= {f"the method's {name}": Same(t, t._version) for name, t in self._held.items()}
        for owner, attributes in self._owners.items():
            for name, value in attributes.items():
                if name not in _OWN:
                    inside = not isinstance(value, nn.Module)  # those are owners themselves
                    found[f"attribute {name} of {owner}"] = mark(value, self._own) if inside else Same(value)
        found["Python's random numbers"] = random.getstate()
        numbers = np.random.get_state()  # noqa: NPY002 - users' own draws
        found["numpy's random numbers"] = [mark(one, self._own) for one in numbers]
        return found

    def keep(self) -> Back:
        """Return what brings everything back to how it is now."""
        return Back([[*self._tensors, *self._held.values()], *self._owners.values()], self._own)

    def watch(self) -> Callable[[], str]:
        """Return what names an attribute that is another one than now, empty if none is; cheap, for every visit.

        A tensor is the same in its place, whatever its values: a recording reads them there.
        """
        saved = [
            (owner, attributes, {name: self._kept(value) for name, value in attributes.items() if name not in _BETWEEN})
            for owner, attributes in self._owners.items()
        ]

        slopes = {name: p.requires_grad for name, p in self._trained.items()}

        def other() -> str:
            for name, needed in slopes.items():
                if self._trained[name].requires_grad != needed:
                    return f"whether {name} is trained"
            for owner, attributes, before in saved:
                for name, value in attributes.items():
                    if name not in _BETWEEN and not self._stands(before.get(name), value):
                        return f"attribute {name} of {owner}"
                if gone := before.keys() - attributes.keys():
                    return f"attribute {min(gone)} of {owner}"
            return ""

        return other

    def _kept(self, value: Any) -> tuple[Any, Any]:
        """Return `value`, and its mark if it can change in its place; None if it is compared by identity first."""
        fixed = (*PLAIN, Tensor, nn.Module)
        flat = isinstance(value, tuple) and all(isinstance(one, PLAIN) for one in value)
        return value, None if flat or isinstance(value, fixed) else mark(value, self._own, versions=False)

    def _stands(self, before: tuple[Any, Any] | None, value: Any) -> bool:
        """Return whether `value` is what :meth:`_kept` kept."""
        if before is None:
            return False
        old, was = before
        if was is not None:
            return bool(mark(value, self._own, versions=False) == was)
        if value is old:
            return True
        return bool(mark(value, self._own, versions=False) == mark(old, self._own, versions=False))


class Back:
    """Brings what `held` holds, and the random numbers of Python and numpy, back to how they are now."""

    def __init__(self, held: Iterable[Any], own: Own) -> None:
        known: dict[int, Any] = {}
        self._puts = [put for one in held for put in putting_back(one, own, known)]
        self._draws = random.getstate(), np.random.get_state()  # noqa: NPY002

    def __call__(self) -> None:
        """Bring everything back."""
        for put in self._puts:
            put()
        random.setstate(self._draws[0])
        np.random.set_state(self._draws[1])  # noqa: NPY002

    def in_secret(self) -> bool:
        """Return whether a tensor has other values, and :meth:`Outside.marks` cannot see it."""
        return any(put.in_secret() for put in self._puts if isinstance(put, Kept))


def changed(before: Marks, after: Marks) -> str:
    """Return a place that is not as it was; empty if all are."""
    places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    return min(places, default="")


def _unseen(value: Any, own: Own, depth: int = 3) -> str:
    """Return what in `value` cannot be recorded, as the end of a sentence; empty if nothing is known of that kind."""
    if isinstance(value, PLAIN) or own.has(value):
        return ""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return "has a gradient's history; keep it with .detach()"  # torch may end a recording that meets its nodes
    if reason := iterator(value):
        return reason
    inside = children(value).values() if depth else ()
    return next(filter(None, (_unseen(one, own, depth - 1) for one in inside)), "")
