"""The batched trainer against the sequential one, which is the definition of what training is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcross.client.batched.stack import alike, fitting
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Trained, Visit, flatten
from fedcross.tasks.models._split import Split
from tests.support import visits as v

#: One round of these small models in float64; what is left is the order of sums.
EXACT = 1e-10
#: The same in float32.
SINGLE = 2e-5


class Pulled(Objective):
    """Has everything: a term in the loss over per-example values, a closed-form gradient, values per example."""

    def prepare(self, visit: Visit) -> Prepared:
        start = flatten(visit.params)
        still = visit.net.logits(visit.params, visit.buffers, visit.x, train=False)
        return {"start": start, "mu": 0.3, "teacher": {"mean": still.mean(0)}, "client": float(visit.client > 99)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores = net.classify(params, buffers, net.features(params, buffers, batch.x))
        apart = ((scores - prepared["teacher"]["mean"]) ** 2).sum(1)
        own = functional.cross_entropy(scores, batch.y, reduction="none")
        return batch.mean(own) + prepared["mu"] * batch.mean(apart)

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor:
        return prepared["mu"] * (flat - prepared["start"])


def one_by_one(
    net: ModuleNet, objective: Objective, clients: list[Visit], augment: Any = None, **changes: Any
) -> list[Trained]:
    results = []
    for one in clients:
        v.enter(net, one)
        done = train(net, objective, one, v.prepared(objective, one), v.settings(**changes), augment)
        results.append(
            Trained(
                {n: t.detach().clone() for n, t in done.params.items()},
                {n: t.clone() for n, t in done.buffers.items()},
                done.flat.clone(),
                None if done.momentum is None else done.momentum.clone(),
                done.steps,
                done.loss,
            )
        )
    return results


def agree(a: Trained, b: Trained, tolerance: float) -> None:
    assert a.steps == b.steps
    assert a.loss == pytest.approx(b.loss, abs=tolerance)
    assert a.momentum is not None
    assert b.momentum is not None
    torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=tolerance)
    torch.testing.assert_close(a.momentum, b.momentum, rtol=0, atol=tolerance)
    for one, two in ((a.params, b.params), (a.buffers, b.buffers)):
        assert list(one) == list(two)
        for name in one:
            torch.testing.assert_close(one[name].detach(), two[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("objective", [Objective(Settings()), Pulled(Settings())], ids=["plain", "pulled"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("sizes", [(9, 9, 9), (12, 5, 7, 3)], ids=["equal", "unequal"])
def test_agrees_with_the_sequential_trainer(
    objective: Objective, norm: bool, dropout: bool, sizes: tuple[int, ...]
) -> None:
    net = v.small_net(norm=norm, dropout=dropout)
    clients = [v.visit(net, i, n) for i, n in enumerate(sizes)]
    expected = one_by_one(net, objective, clients)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings())
    for a, b in zip(found, expected, strict=True):
        agree(a, b, EXACT)


def test_agrees_in_single_precision() -> None:
    net = v.small_net(norm=True, dropout=True, dtype=torch.float32)
    objective = Pulled(Settings())
    clients = [v.visit(net, i, n) for i, n in enumerate((12, 5, 7))]
    expected = one_by_one(net, objective, clients)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings())
    for a, b in zip(found, expected, strict=True):
        agree(a, b, SINGLE)


@pytest.mark.parametrize(
    "changes", [{"momentum": 0.0, "weight_decay": 0.0}, {"batch": 100}, {"epochs": 1}, {"clip": 0.05}]
)
def test_agrees_under_other_settings(changes: dict[str, Any]) -> None:
    net = v.small_net()
    clients = [v.visit(net, i, n) for i, n in enumerate((3, 8))]
    objective = Objective(Settings())
    expected = one_by_one(net, objective, clients, **changes)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(**changes))
    for a, b in zip(found, expected, strict=True):
        agree(a, b, EXACT)


def test_agrees_under_adam_where_clients_end_apart() -> None:
    net, objective, changes = v.small_net(norm=True), Objective(Settings()), {"optimizer": "adam", "momentum": 0.0}
    clients = [v.visit(net, i, n) for i, n in enumerate((3, 20, 9))]
    expected = one_by_one(net, objective, clients, **changes)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(**changes))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=EXACT)


@pytest.mark.parametrize("norm", [False, True])
def test_augments_with_the_draws_of_the_sequential_trainer(norm: bool) -> None:
    net = v.small_net(norm=norm)
    objective = Objective(Settings())

    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)

    clients = [v.visit(net, i, n) for i, n in enumerate((6, 9))]
    expected = one_by_one(net, objective, clients, noisy)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(), noisy)
    for a, b in zip(found, expected, strict=True):
        agree(a, b, EXACT)


def test_starts_from_the_momentum_and_learning_rate_of_each_visit() -> None:
    net = v.small_net()
    objective = Objective(Settings())
    clients = [v.visit(net, 0, 6, momentum=torch.full_like(net.flat, 0.2)), v.visit(net, 1, 6, lr=0.02)]
    expected = one_by_one(net, objective, clients)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings())
    for a, b in zip(found, expected, strict=True):
        agree(a, b, EXACT)


def test_a_round_that_does_not_fit_is_split_and_gives_the_same() -> None:
    net = v.small_net()
    objective = Objective(Settings())
    works = [v.work(net, objective, v.visit(net, i, n)) for i, n in enumerate((5, 12, 7))]
    assert fitting(net, objective, works[0], 4, memory=1) == 1
    assert fitting(net, objective, works[0], 4, memory=None) > 3
    whole = train_batched(net, objective, works, v.settings())
    split = train_batched(net, objective, works, v.settings(), memory=1)
    for a, b in zip(split, whole, strict=True):
        agree(a, b, EXACT)


def test_the_loss_of_a_single_example_is_its_own() -> None:
    net, objective = v.small_net(), Objective(Settings())
    clients = [v.visit(net, i, 1) for i in range(2)]
    expected = one_by_one(net, objective, clients, epochs=1)
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(epochs=1))
    for a, b in zip(found, expected, strict=True):
        agree(a, b, EXACT)
        assert a.loss > 0


def test_a_batch_that_torch_refuses_is_refused_here_too() -> None:
    """A single vector has no variance. Recorded steps do not wait to find that out, others do."""
    layers = [nn.Flatten(), nn.Linear(72, 4), nn.BatchNorm1d(4), nn.ReLU()]
    net, objective = ModuleNet(Split(nn.Sequential(*layers), nn.Linear(4, 3)).double(), v.CPU), Objective(Settings())
    works = [v.work(net, objective, v.visit(net, i, 5)) for i in range(2)]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train_batched(net, objective, works, v.settings())


def test_clients_whose_prepared_values_differ_are_not_stacked() -> None:
    """Constants are compared by value; an array of NumPy's is not, whatever its shortened text says."""

    def groups(*values: Any) -> list[list[int]]:
        visit = SimpleNamespace(inputs=SimpleNamespace(kind="images"))
        return alike([SimpleNamespace(prepared={"a": one}, visit=visit) for one in values], frozenset())  # type: ignore[misc]

    assert groups(1.5, 1.5, 2.5) == [[0, 1], [2]]
    assert groups(torch.zeros(2), torch.ones(2)) == [[0, 1]]
    same = np.zeros(2000)
    assert groups(same, same, np.eye(1, 2000, 900)[0]) == [[0, 1], [2]]
