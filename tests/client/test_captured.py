"""Recorded steps against the plain loop, to the bit. A tape repeats operations as a CUDA graph does, without Python."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from fedcross.client import captured, recordings
from fedcross.client.batched.captured import Together
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.core.settings import Settings
from fedcross.strategies.fedsam import FedSAMParams, Sharpness
from fedcross.strategies.parts.objective import Batch, Net, Objective, Prepared, Tensors, Trained, Visit
from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.models._recurrent import LastStepLSTM
from fedcross.tasks.models._split import Split
from fedcross.tasks.reading.params import Normalise
from tests.client.batched.test_trainer import Noisy, Pulled, one_by_one
from tests.support import visits as v
from tests.support.tape import TapeRecorder, WarmRecorder

#: Most of these clients have a short last batch, one has no full one, and some are larger than the first.
SIZES = (9, 12, 5, 3, 14, 8)


class Taught(Objective):
    """Looks a tensor of one entry per example up, and has a weight that changes from visit to visit."""

    by_row = frozenset({"teacher"})

    def prepare(self, visit: Visit) -> Prepared:
        teacher = visit.net.logits(visit.params, visit.buffers, visit.x, train=False).detach()
        return {"teacher": teacher, "weight": torch.tensor(0.1 * visit.client, dtype=visit.x.dtype)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        rows = torch.arange(len(batch.y)) if batch.rows is None else batch.rows
        apart = (net.logits(params, buffers, batch.x) - prepared["teacher"][rows]) ** 2
        return prepared["weight"] * batch.mean(apart.sum(1)) + super().loss(net, params, buffers, batch, prepared)


class Pointed(Objective):
    """Compares scores with all rows of a table that has as many rows as the client has examples, by chance."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"table": torch.linspace(-1, 1, 5 * visit.classes, dtype=visit.x.dtype).view(5, visit.classes)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        apart = torch.cdist(net.logits(params, buffers, batch.x), prepared["table"])
        return batch.mean(torch.logsumexp(apart, 1)) + super().loss(net, params, buffers, batch, prepared)


OBJECTIVES = {
    "plain": Objective(Settings()),
    "pulled": Pulled(Settings()),
    "noisy": Noisy(Settings()),
    "taught": Taught(Settings()),
    "ascending": Sharpness(FedSAMParams(rho=0.1)),
}


def compared(
    net: ModuleNet, objective: Objective, clients: list[Visit], augment: Any = None, **changes: Any
) -> tuple[Captured, TapeRecorder]:
    """Train `clients` by the plain loop and with recorded steps; assert that everything is equal to the bit."""
    recorder = TapeRecorder()
    expected = one_by_one(net, objective, clients, augment, **changes)
    one = Captured(net, objective, record=recorder)
    for client, plain in zip(clients, expected, strict=True):
        v.enter(net, client)
        found = one.train(client, objective.prepare(client), v.settings(**changes), augment)
        equal(found, plain)
    return one, recorder


def equal(found: Trained, plain: Trained) -> None:
    assert (found.steps, found.loss) == (plain.steps, plain.loss)
    assert found.momentum is not None
    assert plain.momentum is not None
    assert torch.equal(found.flat, plain.flat)
    assert torch.equal(found.momentum, plain.momentum)
    for name, buffer in plain.buffers.items():
        assert torch.equal(found.buffers[name], buffer), name


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["", "norm dropout"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_gives_what_the_plain_loop_gives(objective: Objective, layers: str) -> None:
    net = v.small_net(norm="norm" in layers, dropout="dropout" in layers, dtype=torch.float32)
    clients = [v.visit(net, i, n, lr=0.1 / (i + 1)) for i, n in enumerate(SIZES)]
    one, recorder = compared(net, objective, clients)
    assert one.refused is None
    assert recorder.recordings == 3  # the first client's, and for the larger ones with 12 and 14 examples
    assert recorder.replays > 10


def test_one_recording_serves_all_clients_if_the_largest_is_known() -> None:
    net, objective, recorder = v.small_net(), OBJECTIVES["taught"], TapeRecorder()
    one = Captured(net, objective, examples=14, record=recorder)
    clients = [v.visit(net, i, n) for i, n in enumerate(SIZES)]
    for client, plain in zip(clients, one_by_one(net, objective, clients), strict=True):
        v.enter(net, client)
        equal(one.train(client, objective.prepare(client), v.settings()), plain)
    assert recorder.recordings == 1


@pytest.mark.parametrize("examples", [4, 8, 12])
def test_a_visit_of_fewer_steps_than_a_warm_up_is_recorded(examples: int) -> None:
    net, objective = v.small_net(dtype=torch.float32), Objective(Settings())
    client, recorder = v.visit(net, 0, examples), WarmRecorder()
    (plain,) = one_by_one(net, objective, [client], epochs=1, batch=4)
    one = Captured(net, objective, record=recorder)
    for _ in range(3):
        v.enter(net, client)
        equal(one.train(client, {}, v.settings(epochs=1, batch=4)), plain)
    assert one.refused is None
    assert recorder.replays >= 2


def test_a_table_with_as_many_rows_as_the_client_has_examples_stays_as_it_is() -> None:
    net, objective = v.small_net(dtype=torch.float32), Pointed(Settings())
    clients = [v.visit(net, number, size) for number, size in enumerate((5, 14, 5))]
    expected = one_by_one(net, objective, clients, batch=4)
    one = Captured(net, objective, examples=14, record=TapeRecorder())
    for client, plain in zip(clients, expected, strict=True):
        v.enter(net, client)
        equal(one.train(client, objective.prepare(client), v.settings(batch=4)), plain)
    assert one.refused is None


def test_a_recurrent_network_is_recorded_too() -> None:
    torch.manual_seed(3)
    net = ModuleNet(Split(nn.Sequential(nn.Embedding(9, 4), LastStepLSTM(4, 5, 2)), nn.Linear(5, 3)), v.CPU)
    generator = torch.Generator().manual_seed(1)
    clients = [v.visit(net, i, 9, inputs=Inputs(torch.randint(9, (9, 6), generator=generator))) for i in range(3)]
    one, recorder = compared(net, Objective(Settings()), clients)
    assert one.refused is None
    assert recorder.recordings == 1


@pytest.mark.parametrize("changes", [{"momentum": 0.0, "weight_decay": 0.0}, {"clip": 0.05}, {"epochs": 1, "batch": 3}])
def test_gives_the_same_under_other_settings(changes: dict[str, Any]) -> None:
    net = v.small_net()
    clients = [v.visit(net, 0, 9, momentum=torch.full_like(net.flat, 0.2)), v.visit(net, 1, 7)]
    one, _ = compared(net, Objective(Settings()), clients, **changes)
    assert one.refused is None


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)


def test_augmented_inputs_come_from_outside() -> None:
    net = v.small_net()
    clients = [v.visit(net, i, 9) for i in range(3)]
    one, recorder = compared(net, Objective(Settings()), clients, noisy)
    assert one.refused is None
    assert recorder.replays > 0


def test_other_epochs_and_another_exchange_need_no_other_settings() -> None:
    """A method may ask for other epochs in an exchange; more steps than there is room for are recorded anew."""
    net, objective, recorder = v.small_net(), Objective(Settings()), TapeRecorder()
    one = Captured(net, objective, record=recorder)
    for epochs, made in ((2, 1), (1, 1), (5, 2)):
        client = v.visit(net, 0, 9, exchange=epochs)
        plain = one_by_one(net, objective, [client], epochs=epochs)[0]
        v.enter(net, client)
        equal(one.train(client, {}, v.settings(epochs=epochs)), plain)
        assert recorder.recordings == made


class Reading(Objective):
    """Reads a number of the GPU in every step, for which the host would have to wait."""

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        loss = super().loss(net, params, buffers, batch, prepared)
        return loss * (2 if loss.item() > 1 else 1)


class Hiding(Objective):
    """Keeps a tensor of the visit where nobody looks, and a recording keeps that of the first visit."""

    shift: ClassVar[Tensor]

    def prepare(self, visit: Visit) -> Prepared:
        Hiding.shift = torch.full((3,), float(visit.client), dtype=visit.x.dtype).diag().sum(0)
        return {}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores = net.logits(params, buffers, batch.x)
        return ((scores - self.shift) ** 2).mean()


class Counting(Objective):
    """Prepares a Python number that no other visit has."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"number": visit.client}


class Wrapping(Objective):
    """Prepares an object that hides its tensors."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"object": object()}


class Living(Objective):
    """Penalises a weight that it prepared: the model's own one, with its gradient."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"weight": cast("ModuleNet", visit.net).params["classifier.weight"]}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        penalty = (prepared["weight"] ** 2).sum()
        return super().loss(net, params, buffers, batch, prepared) + 0.1 * penalty


class Seeing(Living):
    """Penalises a distance from the weights as they are now, without a gradient there."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"weight": cast("ModuleNet", visit.net).params["classifier.weight"].detach()}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return Objective.loss(self, net, params, buffers, batch, prepared) * (1 + (prepared["weight"] ** 2).sum())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Living, "requires a gradient"),
        (Seeing, "is part of the model that trains"),
        (Reading, r"a step cannot be recorded \(operation not permitted when stream is capturing"),
        (Hiding, "a replayed step differs from a called one"),
        (Counting, "differs from visit to visit"),
        (Wrapping, "holds a object, whose contents cannot be compared"),
    ],
)
def test_what_cannot_be_recorded_is_trained_by_the_plain_loop_and_says_why(
    kind: type[Objective], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, objective, recorder = v.small_net(), kind(Settings()), TapeRecorder()
    one = Captured(net, objective, record=recorder)
    for i in range(recordings.MOST + 2):
        client = v.visit(net, i, 9)
        v.enter(net, client)
        prepared = objective.prepare(client)
        plain = captured.train(net, objective, client, prepared, v.settings())
        kept = plain.flat.clone()
        v.enter(net, client)
        found = one.train(client, prepared, v.settings())
        assert torch.equal(found.flat, kept)
        assert found.loss == plain.loss
    assert one.refused is not None
    assert re.search(reason, one.refused)
    assert [record.message.count("CUDA graphs are not used") for record in caplog.records] == [1]


def test_too_little_memory_for_the_copies_leaves_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    net, objective = v.small_net(), Objective(Settings())
    monkeypatch.setattr(captured, "_space", full)
    one, recorder = compared(net, objective, [v.visit(net, 0, 9)])
    assert one.refused == "the device's memory is too small for a copy of the clients' data"
    assert recorder.recordings == 0


class Large(Objective):
    """Finds too little memory for a short batch while there is a recording."""

    alive: Callable[[], object] = staticmethod(lambda: None)

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        if len(batch.y) < v.settings().batch and self.alive() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss(net, params, buffers, batch, prepared)


def test_a_visit_that_finds_too_little_memory_beside_a_recording_begins_anew_without_it() -> None:
    """Also its dropout, statistics and momentum are those of the plain loop."""
    net, objective = v.small_net(norm=True, dropout=True, dtype=torch.float32), Large(Settings())
    clients = [v.visit(net, i, 9) for i in range(2)]
    expected = one_by_one(net, objective, clients)

    def record(call: Callable[[], None]) -> Callable[[], None]:
        replay = TapeRecorder()(call)
        objective.alive = weakref.ref(replay)  # type: ignore[method-assign]
        return replay

    one = Captured(net, objective, record=record)
    for client, plain in zip(clients, expected, strict=True):
        v.enter(net, client)
        equal(one.train(client, {}, v.settings()), plain)
    assert one.refused == "the device's memory is too small for a recorded step"
    assert objective.alive() is None


def as_bytes(one: Visit) -> tuple[Visit, Visit]:
    """Return `one` with pictures that lie as bytes, and with the same ones prepared beforehand."""
    generator = torch.Generator().manual_seed(one.client)
    held = torch.randint(256, (len(one.y), 2, 6, 6), generator=generator, dtype=torch.uint8)
    normalise = Normalise((0.4, 0.5), (0.3, 0.2), 255.0)
    raw = Inputs(held, Prepare(normalise, 4, v.CPU))
    return replace(one, inputs=raw), replace(one, inputs=Inputs(normalise(held.numpy())))


@pytest.mark.slow
@pytest.mark.parametrize("augment", [None, noisy])
def test_bytes_are_looked_up_and_prepared_inside_the_step(augment: Any) -> None:
    """Called and recorded, to the bit; what a method prepares from all examples is the same too."""
    net, recorder = v.small_net(dtype=torch.float32), TapeRecorder()
    pairs = [as_bytes(v.visit(net, i, n)) for i, n in enumerate((9, 6, 3))]
    for objective in (OBJECTIVES["plain"], OBJECTIVES["taught"]):
        expected = one_by_one(net, objective, [prepared for _, prepared in pairs], augment)
        one = Captured(net, objective, examples=9, record=recorder)
        for (held, _), plain in zip(pairs, expected, strict=True):
            v.enter(net, held)
            equal(one.train(held, objective.prepare(held), v.settings(), augment), plain)
        assert one.refused is None
        for found, plain in zip(one_by_one(net, objective, [held for held, _ in pairs], augment), expected):
            equal(found, plain)
    assert recorder.recordings == 2
    (stage,) = one._recordings._stages.values()
    assert (stage._x.held.dtype, stage._x.held.shape) == (torch.uint8, (9, 2, 6, 6))


def test_a_recording_of_bytes_does_not_serve_inputs_that_are_prepared() -> None:
    net, objective, recorder = v.small_net(dtype=torch.float32), Objective(Settings()), TapeRecorder()
    one = Captured(net, objective, record=recorder)
    for made, client in enumerate(as_bytes(v.visit(net, 0, 9)), start=1):
        v.enter(net, client)
        one.train(client, {}, v.settings())
        assert recorder.recordings == made


class Following(nn.Module):
    """Has a teacher, frozen, that follows its first layer in each step, and shifts what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(72, 8))
        self.classifier = nn.Linear(8, 3)
        self.teacher = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(h.mean(0), alpha=0.1)
        scores: Tensor = self.classifier(h - self.teacher)
        return scores


@pytest.mark.parametrize("objective", [Objective(Settings()), Hiding(Settings())], ids=["recorded", "differs"])
def test_a_frozen_parameter_that_a_step_changes_is_restored_and_compared(objective: Objective) -> None:
    """A momentum encoder, say: warm-ups and comparisons leave it, and a visit that begins anew starts from it."""
    torch.manual_seed(7)
    net = ModuleNet(Following().double(), torch.device("cpu"))
    one, _ = compared(net, objective, [v.visit(net, i, 14) for i in range(4)])
    assert (one.refused is None) == (type(objective) is Objective)
    assert float(net.buffers["teacher"].abs().max()) > 0


class Choosing(Objective):
    """Chooses by the step's number, which a recorded step has as a tensor: an error there alone."""

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        weight = {0: 2.0}.get(batch.step, 1.0) if isinstance(batch.step, int) else [1.0][batch.step.shape[0]]
        return weight * super().loss(net, params, buffers, batch, prepared)


def test_a_step_that_fails_only_where_it_is_to_be_recorded_is_left_to_the_plain_loop() -> None:
    net, objective = v.small_net(), Choosing(Settings())
    captured = compared(net, objective, [v.visit(net, i, 9) for i in range(2)])[0]
    assert captured.refused == "a step fails where it is to be recorded (tuple index out of range)"


class Steeper(torch.autograd.Function):
    """Changes the gradient, not the loss, by a number that no attribute holds."""

    factor: ClassVar[float] = 1.0

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return Steeper.factor * slope

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        return Steeper.apply(x), dims[0]


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(72, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.second(cast("Tensor", Steeper.apply(torch.relu(self.first(x.flatten(1))))))
        return scores


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_wrong_gradient_is_found_at_a_small_rate(
    monkeypatch: pytest.MonkeyPatch, momentum: float, batched: bool
) -> None:
    """The weights are a million times as long as what a step changes."""
    net, objective = ModuleNet(Steep(), torch.device("cpu")), Objective(Settings())
    settings = v.settings(momentum=momentum, weight_decay=0.0)
    recorder = WarmRecorder()
    alone, together = Captured(net, objective, 12, recorder), Together(net, objective, 12, recorder)
    for number in range(4):
        monkeypatch.setattr(Steeper, "factor", 1.0 + 0.1 * number)
        one = v.visit(net, number, 12, lr=1e-6)
        v.enter(net, one)
        if batched:
            train_batched(net, objective, [v.work(net, objective, one)], settings, together=together)
        else:
            alone.train(one, {}, settings)
    assert (together if batched else alone).refused == "a replayed step differs from a called one"
