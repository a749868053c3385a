"""A method that remembers something from step to step trains with recordings as it does without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcross.client.batched.captured import Together
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.outside import Outside
from fedcross.client.recordings import MOST
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


def kept_loss(own: Any, _: Any) -> Any:
    own.last = torch.ones((), requires_grad=True) * 2
    return own.last


def prepared(_: Any, given: Any) -> Any:
    return given["mean"].add_(1).clone()


def teacher(own: Any, _: Any) -> Any:
    with torch.no_grad():
        own.teacher.weight.mul_(0.99)
    return own.teacher.weight.sum().detach()


def helper(own: Any, _: Any) -> Any:
    own.helper.mean.add_(1)
    return own.helper.mean.clone()


def counter(own: Any, _: Any) -> Any:
    own.helper.slotted.now += 1
    return own.helper.slotted.now


def inner_teacher(own: Any, _: Any) -> Any:
    with torch.no_grad():
        own.helper.all[0].weight.mul_(0.99)
    return own.helper.all[0].weight.sum().detach()


def by_data(own: Any, _: Any) -> Any:
    own.teacher.weight.data.mul_(0.99)
    return own.teacher.weight.sum().detach()


def norm(own: Any, _: Any) -> Any:
    own.norm(torch.arange(6.0).view(3, 2))
    return own.norm.running_mean.sum().clone()


#: What a step's weight is, and what the reason names.
REMEMBERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a tensor, another one each step": (rebound, "attribute count of the method"),
    "a tensor, in place": (in_place, "attribute count of the method"),
    "a number": (number, "attribute steps of the method"),
    "a list": (remembered, "attribute past of the method"),
    "a loss, with its graph": (kept_loss, "attribute last of the method"),
    "a prepared tensor": (prepared, "prepared tensor 0"),
    "a module's weight": (teacher, "the method's teacher.weight"),
    "a module's statistics": (norm, "the method's norm."),
    "a module's weight, in a list of a helper": (inner_teacher, "attribute helper of the method"),
    "a module's weight, by its data": (by_data, "the values of a tensor, by its .data"),
    "a helper's tensor": (helper, "attribute helper of the method"),
    "a helper's counter": (counter, "attribute helper of the method"),
    "a generator's draw": (lambda own, _: own.draws.random(), "attribute draws of the method"),
    "a draw of an own random.Random": (lambda own, _: own.python.random(), "attribute python of the method"),
    "an old generator's draw": (lambda own, _: own.old.rand(), "attribute old of the method"),
    "Python's draw": (lambda *_: random.random(), "Python's random numbers"),
    "numpy's draw": (lambda *_: np.random.rand(), "numpy's random numbers"),  # noqa: NPY002
}


class Remembering(Objective):
    """Weights the loss by something of its own."""

    def __init__(self, weight: Callable[[Any, Any], Any]) -> None:
        super().__init__(Settings())
        self.weight, self.count, self.steps, self.past = weight, torch.zeros(()), 0, list[Tensor]()
        self.last: Tensor | None = None
        self.teacher, self.draws, self.norm = nn.Linear(1, 1), np.random.default_rng(5), nn.BatchNorm1d(2)
        self.python, self.old = random.Random(5), np.random.RandomState(5)
        nn.init.ones_(self.teacher.weight)
        inner = nn.Linear(1, 1)
        nn.init.ones_(inner.weight)
        self.helper = SimpleNamespace(mean=torch.zeros(()), slotted=Slotted(), all=[inner])

    def loss(self, *rest: Any) -> Tensor:
        weight = self.weight(self, rest[-1])
        return super().loss(*rest) * (1 + 1e-3 * weight)


def beside_the_plain_loop(make: Callable[[], Objective], visits: int = 3) -> Captured:
    """Train with recordings and without; assert that every visit gives the same to the bit."""
    found = []
    for recorded in (False, True):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        net, own = v.small_net(), make()
        captured = Captured(net, own, record=WarmRecorder())
        for i in range(visits):
            one = v.visit(net, i, 12)
            net.load({name: tensor.detach().numpy() for name, tensor in {**one.params, **one.buffers}.items()})
            values = {"mean": torch.zeros(())}
            if recorded:
                trained = captured.train(one, values, v.settings())
            else:
                trained = train(net, own, one, values, v.settings())
            found.append(trained.flat.clone())
    for plain, other in zip(found[:visits], found[visits:], strict=True):
        assert torch.equal(plain, other)
    return captured


@pytest.mark.parametrize("name", REMEMBERS)
def test_what_a_step_remembers_is_not_recorded(name: str) -> None:
    """Also the first visit, in which the recording was tried, is that of the plain loop to the bit."""
    weight, reason = REMEMBERS[name]
    captured = beside_the_plain_loop(lambda: Remembering(weight))
    assert captured.replays == 0
    assert f"it changes what a recording would keep as it was: {reason}" in str(captured.refused)


class Ticking(Objective):
    """Draws from an iterator, or from nothing, and keeps one."""

    def __init__(self, held: Any, *, draws: bool) -> None:
        super().__init__(Settings())
        self.held, self.draws = SimpleNamespace(all=[held]), draws

    def loss(self, *rest: Any) -> Tensor:
        return super().loss(*rest) * (1 + 1e-3 * (next(self.held.all[0]) if self.draws else 1))


@pytest.mark.parametrize(
    ("make", "draws", "reason"),
    [
        (lambda: itertools.count(1), True, "holds a count, which nobody can put back to where it was"),
        (lambda: (i for i in range(10**6)), True, "holds a generator, which nobody can put back to where it was"),
        (lambda: torch.ones((), requires_grad=True) * 2, False, "has a gradient's history; keep it with .detach()"),
        (lambda: torch.Generator(), False, None),
        (lambda: Path(__file__).open(), False, None),  # noqa: SIM115 - closed below
    ],
)
def test_what_nobody_can_put_back_is_not_recorded(make: Callable[[], Any], draws: bool, reason: str | None) -> None:
    """It is refused before the first call."""
    held = []

    def objective() -> Objective:
        held.append(make())
        return Ticking(held[-1], draws=draws)

    captured = beside_the_plain_loop(objective)
    for one in held:
        getattr(one, "close", lambda: None)()
    whole = None if reason is None else f"a step cannot be recorded (attribute held of the method {reason})"
    assert captured.refused == whole


class Hidden(Objective):
    """Changes a helper at every other call; which one it is, nobody sees."""

    calls: ClassVar[list[int]] = []

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(Settings())
        self.in_place, self.helper = in_place, SimpleNamespace(mean=torch.zeros(()), seen=[])

    def loss(self, *rest: Any) -> Tensor:
        self.calls.append(len(self.calls))
        if len(self.calls) % 2:
            if self.in_place:
                self.helper.mean.add_(1)
            self.helper.seen.append(len(self.calls))
        return super().loss(*rest) * (1 + len(self.calls) / 10)


@pytest.mark.parametrize("batched", [False, True])
def test_a_visit_whose_comparison_refuses_begins_anew(batched: bool) -> None:
    """With all that its steps have changed put back."""
    net, own = v.small_net(), Hidden(in_place=not batched)  # vmap refuses that
    own.calls[:] = [0] * batched  # where the memory of a client is measured there is another call
    one = v.visit(net, 0, 12)
    v.enter(net, one)
    if batched:
        together = Together(net, own, record=WarmRecorder())
        (trained,) = train_batched(net, own, [v.work(net, own, one)], v.settings(), together=together)
        refused = together.refused
    else:
        captured = Captured(net, own, record=WarmRecorder())
        trained = captured.train(one, {}, v.settings())
        refused = captured.refused
    assert refused == "a replayed step differs from a called one"
    plain = [call + 1 for call in own.calls[-trained.steps :] if (call + 1) % 2]
    assert len(own.calls) > trained.steps
    assert own.helper.seen == plain
    assert float(own.helper.mean) == len(plain) * own.in_place


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


@dataclass(slots=True)
class Slotted:
    """A number without a dictionary."""

    now: float = 0.0


class Switched(Objective):
    """Weights the loss by attributes that `change` sets when a visit is prepared."""

    def __init__(self, change: Callable[[Any, int], Any]) -> None:
        super().__init__(Settings())
        self.change, self.weight, self.table, self.scale = change, 0.0, {"a": [0.0]}, torch.ones(())
        self.schedule, self.slotted, self.layer = SimpleNamespace(now=0.0), Slotted(), nn.Identity()
        self.layer.eval()

    def loss(self, net: Any, *rest: Any) -> Tensor:
        layer = float(getattr(net.module, "own_weight", 1.0))
        return super().loss(net, *rest) * self._weight() * self.scale * layer

    def _weight(self) -> float:
        layer = float(self.layer.training) + getattr(self.layer, "now", 0.0)
        return 1 + self.weight + self.table["a"][0] + float(self.schedule.now) + self.slotted.now + layer


def content(own: Any, weight: float) -> None:
    own.table["a"][0] = weight


def inside(own: Any, weight: float) -> None:
    own.schedule.now = weight


def another(own: Any, weight: float) -> None:
    own.scale = torch.tensor(1 + weight)


def below_notice(own: Any, weight: float) -> None:
    """Change so little that no comparison of results would tell."""
    own.weight = weight / 1e3


#: What changes between visits.
SWITCHES: dict[str, Callable[[Any, float], Any]] = {
    "a number": lambda own, weight: setattr(own, "weight", weight),
    "a little": below_notice,
    "in a list in a dictionary": content,
    "in an object": inside,
    "in an object with slots": lambda own, weight: setattr(own.slotted, "now", weight),
    "the mode of a module": lambda own, weight: own.layer.train(weight > 0),
    "a number of a module": lambda own, weight: setattr(own.layer, "now", weight),
    "what is trained": lambda own, weight: own.net.params["classifier.bias"].requires_grad_(weight == 0),
    "another tensor": another,
    "a new attribute of the network": lambda own, weight: weight and setattr(own.net.module, "own_weight", weight),
}


def visits_of(
    change: Callable[[Any, float], Any], weights: list[float], recorder: Any
) -> tuple[Captured, list[Tensor]]:
    """Train a visit for each weight, by the plain loop without a recorder; return the models too."""
    net, own = v.small_net(), Switched(change)
    own.net = net  # type: ignore[attr-defined]
    captured, found = Captured(net, own, record=recorder), []
    for i, weight in enumerate(weights):
        one = v.visit(net, i, 12)
        v.enter(net, one)
        own.change(own, weight)  # type: ignore[arg-type]
        trained = train(net, own, one, {}, v.settings()) if recorder is None else captured.train(one, {}, v.settings())
        found.append(trained.flat.clone())
    return captured, found


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_switched_on_between_visits_is_recorded_anew(name: str) -> None:
    """From the fifth visit on; results are compared in the first, second, fourth and eighth."""
    weights, recorder = [0.0] * 4 + [0.5] * 3, WarmRecorder()
    if name == "another tensor":
        weights = [0.0, 0.5]
    captured, found = visits_of(SWITCHES[name], weights, recorder)
    _, expected = visits_of(SWITCHES[name], weights, None)
    assert captured.refused is None
    assert recorder.recordings == 2
    for plain, other in zip(expected, found, strict=True):
        assert torch.equal(plain, other)


def test_a_tensor_with_other_values_in_its_place_needs_no_other_recording() -> None:
    def filled(own: Any, weight: float) -> None:
        own.scale.fill_(1 + weight)

    weights, recorder = [0.0, 0.5, 0.1, 2.0], WarmRecorder()
    captured, found = visits_of(filled, weights, recorder)
    _, expected = visits_of(filled, weights, None)
    assert captured.refused is None
    assert recorder.recordings == 1
    for plain, other in zip(expected, found, strict=True):
        assert torch.equal(plain, other)


@pytest.mark.slow
def test_an_attribute_that_changes_at_every_visit_ends_the_recordings_and_is_named() -> None:
    weights, recorder = [i / 10 for i in range(12)], WarmRecorder()
    captured, found = visits_of(SWITCHES["a number"], weights, recorder)
    _, expected = visits_of(SWITCHES["a number"], weights, None)
    assert recorder.recordings == MOST
    assert captured.refused == "attribute weight of the method is too often another one at the next visit"
    for plain, other in zip(expected, found, strict=True):
        assert torch.equal(plain, other)


def test_an_equal_value_in_another_object_is_no_change() -> None:
    """A method may set its attributes anew whenever it prepares a visit; what is large is not read each time."""
    own, module = Switched(lambda *_: None), v.small_net().module

    def numbers() -> dict[str, Any]:
        large = {"large": np.zeros(2**17)} if "large" not in vars(own) else {}
        device = {"device": torch.device("cpu"), "at": (np.int64(2), "x")}
        return {"one": np.float32(0.5), "some": np.arange(3), "table": {"a": [0.0]}, **device, **large}

    vars(own).update(numbers())
    watch = Outside(own, module, []).watch()
    vars(own).update(numbers())
    assert watch() == ""
    vars(own)["large"][0] = 1
    assert watch() == ""
    vars(own)["some"][0] = 1
    assert watch() == "attribute some of the method"


def test_looking_for_changes_reads_no_attribute_of_torchs_own() -> None:
    """It is done at every visit, for every layer."""
    net = v.small_net()
    watch = Outside(Objective(Settings()), net.module, []).watch()
    assert watch() == ""
    net.module.register_forward_hook(lambda *_: None).remove()
    assert watch() == ""
    net.module.eval()
    assert watch() == "attribute training of layer of all"
