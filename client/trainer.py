"""The training loop of one client, which minimises the method's objective on the client's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedcross.client.compiled import Compiled
from fedcross.client.flat_model import ModuleNet
from fedcross.client.optimizer import Moments, step
from fedcross.conf.schema import Train
from fedcross.core.randomness import stream, torch_stream
from fedcross.strategies.objective import Batch, Objective, Prepared, Trained, Visit

Augment = Callable[[Tensor, torch.Generator], Tensor]


def train(
    net: ModuleNet,
    objective: Objective,
    visit: Visit,
    prepared: Prepared,
    settings: Train,
    augment: Augment | None = None,
    *,
    compiled: Compiled | None = None,
) -> Trained:
    """Train the model loaded in `net` on the client's data and return the result.

    The optimiser is ``torch.optim``'s (:mod:`client.optimizer`); its state starts at zero unless the visit brings a
    momentum buffer. With `clip`, the norm of the gradient (the objective's term included) is first limited to that
    value. A generator keyed by (seed, round, client, epoch, exchange) shuffles the examples in each epoch; a short
    last batch is kept.

    Parameters
    ----------
    net : ModuleNet
        Holds the received model.
    objective : Objective
        The method's client half.
    visit : Visit
        The client's data, settings and identity.
    prepared : Prepared
        What ``objective.prepare(visit)`` returned.
    settings : Train
        Epochs, batch size, optimiser; the learning rate is ``visit.lr``.
    augment : callable or None
        ``(batch, generator) -> batch``.
    compiled : Compiled, optional
        :func:`loss_of` for this net and objective, for full batches.

    Returns
    -------
    Trained
        Views of the live model (valid until the next visit), the steps taken and the mean loss over examples.
    """
    moments = Moments.of(net.flat, settings, visit.momentum)
    generator = augmentation_stream(visit) if augment is not None else None
    total = torch.zeros((), dtype=net.flat.dtype, device=net.device)
    # A tensor on a GPU: a number would be another kernel argument in every round.
    lr = net.flat.new_full((), visit.lr) if net.device.type == "cuda" else visit.lr
    called = loss_of(net, objective)
    adds_term = type(objective).gradient is not Objective.gradient
    ascends = type(objective).ascent is not Objective.ascent
    steps = seen = 0
    for x, y, rows in batches(visit, settings.epochs, settings.batch):
        inputs = net.arrange(augment(x, generator)) if augment and generator else x
        compute: Callable[..., Tensor] = called
        number: int | Tensor = steps
        if compiled is not None and len(y) == settings.batch:
            compute, number = compiled, torch.tensor(steps, device=net.device)  # a number would be compiled in
        before = [buffer.clone() for buffer in net.module.buffers()] if ascends else []
        net.gradient.zero_()
        loss = compute(inputs, y, rows, number, prepared)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * len(y)
        if ascends:
            _ascend(net, objective, Batch(inputs, y, rows=rows, step=steps), prepared, before)
        with torch.no_grad():
            term = objective.gradient(net.flat, prepared) if adds_term else None
            step(net.flat, net.gradient, moments, lr, settings, steps, term)
        steps += 1
        seen += len(y)
    mean = float(total) / max(seen, 1)
    return Trained(net.params, net.buffers, net.flat, moments.first, steps, mean)


def loss_of(net: ModuleNet, objective: Objective) -> Callable[..., Any]:
    """Return the loss of one batch of the model loaded in `net`, as a function of the batch and the prepared values."""
    cross_entropy = type(objective).loss is Objective.loss

    def loss(x: Tensor, y: Tensor, rows: Tensor, number: int | Tensor, prepared: Prepared) -> Tensor:
        if cross_entropy:  # the default, without a call into another file at every step
            return functional.cross_entropy(net.logits(net.params, net.buffers, x), y, reduction="none").mean()
        return objective.loss(net, net.params, net.buffers, Batch(x, y, rows=rows, step=number), prepared)

    return loss


def _ascend(net: ModuleNet, objective: Objective, batch: Batch, prepared: Prepared, before: list[Tensor]) -> None:
    """Replace ``net.gradient`` by the gradient at the point that the objective asks for; everything else stays.

    `before` holds the module's buffers as they were before the first pass, among them the states of dropout layers.
    """
    way = objective.ascent(net.flat, net.gradient, prepared)
    if way is None:
        return
    buffers, here = list(net.module.buffers()), net.flat.clone()
    after = [buffer.clone() for buffer in buffers]
    _copy_all(before, buffers)
    net.flat.add_(way)
    net.gradient.zero_()
    objective.loss(net, net.params, net.buffers, batch, prepared).backward()  # type: ignore[no-untyped-call]
    net.flat.copy_(here)
    _copy_all(after, buffers)


@torch.no_grad()
def _copy_all(values: list[Tensor], to: list[Tensor]) -> None:
    for value, target in zip(values, to, strict=True):
        target.copy_(value)


def batches(visit: Visit, epochs: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, labels and row numbers of all epochs' batches, ordered by seed, round, client and exchange."""
    inputs = visit.inputs
    for order in (rows.to(visit.y.device) for rows in orders(visit, epochs)):
        held, y = inputs.held[order], visit.y[order]
        for start in range(0, len(order), size):
            part = slice(start, start + size)
            x = held[part]
            yield x if inputs.prepare is None else inputs.ready(x), y[part], order[part]


def later(visit: Visit) -> tuple[int, ...]:
    """Return the exchange as a further key of a random stream; empty for a round's first exchange."""
    return (visit.exchange,) if visit.exchange else ()


def orders(visit: Visit, epochs: int) -> Iterator[Tensor]:
    """Yield the rows of ``visit.inputs`` in the order of each epoch, int64 (n,) on the CPU."""
    for epoch in range(epochs):
        draw = stream(visit.seed, "shuffle", visit.round, visit.client, epoch, *later(visit))
        yield torch.from_numpy(draw.permutation(len(visit.y)))


def augmentation_stream(visit: Visit) -> torch.Generator:
    """Return the random generator for the augmentation in a visit.

    It lives on the CPU: a GPU would draw other numbers, and MPS has no float64. Its few numbers per image are copied.
    """
    return torch_stream(visit.seed, "augment", visit.round, visit.client, *later(visit))
