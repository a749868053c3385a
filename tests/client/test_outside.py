"""A method that remembers something from step to step trains with recordings as it does without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcross.client.captured import Captured
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from tests.support import visits as v
from tests.support.tape import WarmRecorder


def rebound(own: Any, _: Any) -> Any:
    own.count = own.count + 1
    return own.count


def in_place(own: Any, _: Any) -> Any:
    own.count += 1
    return own.count.clone()


def number(own: Any, _: Any) -> Any:
    own.steps += 1
    return own.steps


def remembered(own: Any, _: Any) -> Any:
    own.past.append(own.count)
    return len(own.past)


def prepared(_: Any, given: Any) -> Any:
    return given["mean"].add_(1).clone()


#: What a step's weight is, and what the reason names.
REMEMBERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a tensor, another one each step": (rebound, "attribute count of the method"),
    "a tensor, in place": (in_place, "attribute count of the method"),
    "a number": (number, "attribute steps of the method"),
    "a list": (remembered, "attribute past of the method"),
    "a prepared tensor": (prepared, "prepared tensor 0"),
    "Python's draw": (lambda *_: random.random(), "Python's random numbers"),
    "numpy's draw": (lambda *_: np.random.rand(), "numpy's random numbers"),  # noqa: NPY002
}


class Remembering(Objective):
    """Weights the loss by something of its own."""

    def __init__(self, weight: Callable[[Any, Any], Any]) -> None:
        super().__init__(Settings())
        self.weight, self.count, self.steps, self.past = weight, torch.zeros(()), 0, list[Tensor]()

    def loss(self, *rest: Any) -> Tensor:
        weight = self.weight(self, rest[-1])
        return super().loss(*rest) * (1 + 1e-3 * weight)


@pytest.mark.parametrize("name", REMEMBERS)
def test_what_a_step_remembers_is_not_recorded(name: str) -> None:
    """Also the first visit, in which the recording was tried, is that of the plain loop to the bit."""
    weight, reason = REMEMBERS[name]
    found = []
    for recorded in (False, True):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        net, own = v.small_net(), Remembering(weight)
        captured = Captured(net, own, record=WarmRecorder())
        for i in range(3):
            one = v.visit(net, i, 12)
            net.load({name: tensor.detach().numpy() for name, tensor in {**one.params, **one.buffers}.items()})
            values = {"mean": torch.zeros(())}
            if recorded:
                trained = captured.train(one, values, v.settings())
            else:
                trained = train(net, own, one, values, v.settings())
            found.append(trained.flat.clone())
    assert captured.replays == 0
    assert f"it changes what a recording would keep as it was: {reason}" in str(captured.refused)
    for plain, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(plain, other)


def test_what_a_method_makes_at_its_first_step_is_no_obstacle() -> None:
    def once(own: Any, _: Any) -> Any:
        if not own.past:
            own.past.append(torch.ones(()))
        return own.past[0]

    net = v.small_net()
    captured = Captured(net, Remembering(once), record=WarmRecorder())
    for i in range(2):
        captured.train(v.visit(net, i, 12), {}, v.settings())
    assert captured.refused is None
    assert captured.replays > 0
