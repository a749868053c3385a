"""Networks and methods for which the padding of a short batch would be data; the plain loop says what is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcross.client.batched import padding
from fedcross.client.batched.stack import slopes_of
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Compiled
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.tasks.inputs import Inputs
from tests.client.batched.test_trainer import EXACT, agree, one_by_one
from tests.support import visits as v


class Plain(nn.Module):
    """Two layers, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.add()

    def add(self) -> None:
        """Add further layers."""

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.second(self.between(torch.relu(self.first(x))))
        return scores


class Folded(Plain):
    """Batch normalisation of parts of a row: time, or patches, in the batch axis."""

    def add(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h.reshape(-1, 4)).reshape(-1, 16)
        return out


class Instances(Plain):
    """Normalises each row alone; its running statistics are of all rows."""

    def add(self) -> None:
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h.view(-1, 4, 4)).reshape(-1, 16)
        return out


class Following(Plain):
    """Follows the mean of all batches in a buffer."""

    def add(self) -> None:
        self.register_buffer("mean", torch.zeros(16))

    def between(self, h: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return h - mean


class Centred(Plain):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Normed(Plain):
    def add(self) -> None:
        self.norm = nn.BatchNorm1d(16)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h)
        return out


class Twice(Normed):
    """The second normalisation sees means of 0: its own mean changes by what is rounded."""

    def add(self) -> None:
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.middle, self.last = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.norm(h)))
        return out


class Public(Objective):
    """Learns from examples that all clients have, too."""

    def __init__(self, count: int) -> None:
        super().__init__(Settings())
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        self.y = torch.arange(count) % 3

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores = net.logits(params, buffers, self.x)
        return super().loss(net, params, buffers, batch, prepared) + functional.cross_entropy(scores, self.y)


def made(kind: type[Plain], *sizes: int) -> tuple[ModuleNet, list[Visit]]:
    torch.manual_seed(3)
    net, visits = ModuleNet(kind().double(), v.CPU), []
    for client, count in enumerate(sizes):
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(client), dtype=torch.float64)
        visits.append(v.visit(net, client, count, inputs=Inputs(x)))
    return net, visits


def compared(net: ModuleNet, objective: Objective, clients: list[Visit], *, compiled: bool) -> Compiled | None:
    """Train `clients` together; assert that each learns what it learns alone."""
    step = Compiled(slopes_of(net, objective, padded=True), v.CPU, backend="eager") if compiled else None
    for _ in range(2):
        expected = one_by_one(net, objective, clients)
        works = [v.work(net, objective, client) for client in clients]
        found = train_batched(net, objective, works, v.settings(), compiled=step)
        for one, other in zip(found, expected, strict=True):
            agree(one, other, EXACT)
    return step


MIXING = [Folded, Instances, Following, Centred]


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "compiled"])
def test_rows_that_mix_are_not_padded(kind: type[Plain], compiled: bool) -> None:
    net, clients = made(kind, 14, 11)
    compared(net, Objective(Settings()), clients, compiled=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, Normed, Twice])
def test_rows_that_do_not_mix_are_padded(kind: type[Plain]) -> None:
    net, clients = made(kind, 14, 11)
    assert not compared(net, Objective(Settings()), clients, compiled=True).refused


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 5])
def test_the_methods_own_examples_are_no_batch(count: int) -> None:
    """Four are as many as a batch has."""
    net, clients = made(Normed, 14, 11)
    compared(net, Public(count), clients, compiled=True)


class Counting(Objective):
    """Weights a batch by its number of examples."""

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return super().loss(net, params, buffers, batch, prepared) * len(batch.y)


def test_a_loss_that_counts_the_rows_is_not_padded() -> None:
    net, clients = made(Plain, 14, 11)
    compared(net, Counting(Settings()), clients, compiled=False)


class Drawing(Public):
    """Draws random numbers."""

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        torch.rand(())
        return super().loss(net, params, buffers, batch, prepared)


class Teaching(Plain):
    """Has a teacher that follows the first layer, frozen, and a count that is in no state_dict."""

    def add(self) -> None:
        self.teacher = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.first.bias, alpha=0.1)
        self.get_buffer("count").add_(1)
        return h - self.teacher


def test_a_trial_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method, network, random numbers; and it is made once."""
    net, (one, _) = made(Teaching, 14, 11)
    objective, tried = Drawing(4), []
    real = padding._tried
    monkeypatch.setattr(padding, "_tried", lambda *given, **how: tried.append(1) or real(*given, **how))
    work = v.work(net, objective, one)
    before = [tensor.clone() for tensor in (net.flat, *net.kept)]
    drawn = torch.get_rng_state()
    for _ in range(2):
        padding.counts(net, objective, work, v.settings())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, before, (net.flat, *net.kept)))
    assert tried == [1]
