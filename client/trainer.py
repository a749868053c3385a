"""The training loop of one client: SGD on its data, minimising the method's objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Train
from fedcross.core.randomness import stream, torch_stream
from fedcross.strategies.parts.objective import Batch, Objective, Prepared, Trained, Visit

Augment = Callable[[Tensor, torch.Generator], Tensor]


def train(
    net: ModuleNet,
    objective: Objective,
    visit: Visit,
    prepared: Prepared,
    settings: Train,
    augment: Augment | None = None,
) -> Trained:
    """Train the model loaded in `net` on the client's data and return the result.

    SGD as ``torch.optim.SGD``: ``g += weight_decay * w``, ``m = momentum * m + g``, ``w -= lr * m``; the momentum
    buffer starts at zero unless the visit brings one. With `clip`, the norm of g
    (the objective's closed-form term included) is first limited to that value. A generator keyed by (seed, round,
    client, epoch, exchange) shuffles the examples in each epoch; a short last batch is kept.

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
        Epochs, batch size, momentum, weight decay; the learning rate is ``visit.lr``.
    augment : callable or None
        ``(batch, generator) -> batch``.

    Returns
    -------
    Trained
        Views of the live model (valid until the next visit), the steps taken and the mean loss over examples.
    """
    momentum = visit.momentum.clone() if visit.momentum is not None else torch.zeros_like(net.flat)
    generator = augmentation_stream(visit) if augment is not None else None
    total = torch.zeros((), dtype=net.flat.dtype, device=net.device)
    # On a GPU as in a recorded step: other kernels may round otherwise.
    lr = net.flat.new_full((), visit.lr) if net.device.type == "cuda" else visit.lr
    stepper = Stepper(net, objective, prepared, settings, momentum, total, lr)
    steps = seen = 0
    for x, y, rows in batches(visit, settings.epochs, settings.batch):
        inputs = net.arrange(augment(x, generator)) if augment and generator else x
        stepper.advance(Batch(inputs, y, rows=rows, step=steps))
        steps += 1
        seen += len(y)
    mean = float(total) / max(seen, 1)
    return Trained(net.params, net.buffers, net.flat, momentum, steps, mean)


class Stepper:
    """One step on the model loaded in a net, in place; called here, recorded and replayed in :mod:`client.captured`.

    Parameters
    ----------
    net : ModuleNet
        Holds the model.
    objective, prepared, settings
        As for :func:`train`.
    momentum : Tensor, shape (p,)
        Momentum buffer.
    total : Tensor, shape ()
        Sum of losses over examples; every step adds to it.
    lr : float or Tensor, shape ()
        Learning rate.
    """

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        prepared: Prepared,
        settings: Train,
        momentum: Tensor,
        total: Tensor,
        lr: float | Tensor,
    ) -> None:
        self._net, self._objective, self._prepared, self._settings = net, objective, prepared, settings
        self._momentum, self._total, self._lr = momentum, total, lr
        self._adds_term = type(objective).gradient is not Objective.gradient
        self._ascends = type(objective).ascent is not Objective.ascent

    def advance(self, batch: Batch) -> None:
        """Take the step of `batch`."""
        net, objective, prepared = self._net, self._objective, self._prepared
        before = [buffer.clone() for buffer in net.module.buffers()] if self._ascends else []
        net.gradient.zero_()
        loss = objective.loss(net, net.params, net.buffers, batch, prepared)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._ascends:
            _ascend(net, objective, batch, prepared, before)
        with torch.no_grad():
            term = objective.gradient(net.flat, prepared) if self._adds_term else None
            step(net.flat, net.gradient, self._momentum, self._lr, self._settings, term)
            self._total += loss.detach() * len(batch.y)


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


def step(
    flat: Tensor, gradient: Tensor, momentum: Tensor, lr: float | Tensor, settings: Train, term: Tensor | None = None
) -> None:
    """Take one SGD step of one model, or of many at once, in place; overwrites `gradient`.

    Parameters
    ----------
    flat, gradient, momentum : Tensor, shape (..., p)
        Parameters, the gradient of the loss, momentum buffers.
    lr : float or Tensor
        Learning rate; a tensor () for one model, (..., 1) for one rate per model.
    settings : Train
        Momentum, weight decay, clipping.
    term : Tensor, shape (..., p), optional
        The term that the objective adds to the gradient (:meth:`strategies.parts.objective.Objective.gradient`).
    """
    if term is not None:
        gradient.add_(term)
    if settings.clip is not None:
        gradient.mul_((settings.clip / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0))
    if settings.weight_decay:
        gradient.add_(flat, alpha=settings.weight_decay)
    if settings.momentum:
        gradient = momentum.mul_(settings.momentum).add_(gradient)
    if not isinstance(lr, Tensor):
        flat.add_(gradient, alpha=-lr)
    elif lr.dim() == 0:  # on a CPU the same to the bit; a CUDA graph would keep the number of its recording
        flat.addcmul_(gradient, lr, value=-1)
    else:
        flat.sub_(gradient * lr)


def batches(visit: Visit, epochs: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, labels and row numbers of all epochs' batches, ordered by seed, round, client and exchange."""
    inputs = visit.inputs
    for order in orders(visit, epochs):
        held, y = inputs.held[order], visit.y[order]
        for start in range(0, len(order), size):
            part = slice(start, start + size)
            x = held[part]
            yield x if inputs.prepare is None else inputs.ready(x), y[part], order[part]


def later(visit: Visit) -> tuple[int, ...]:
    """Return the exchange as a further key of a random stream; empty for a round's first exchange."""
    return (visit.exchange,) if visit.exchange else ()


def orders(visit: Visit, epochs: int) -> Iterator[Tensor]:
    """Yield the rows of ``visit.inputs`` in the order of each epoch, int64 (n,) on the data's device."""
    for order in host_orders(visit, epochs):
        yield order.to(visit.y.device)


def host_orders(visit: Visit, epochs: int) -> Iterator[Tensor]:
    """Yield the rows of ``visit.inputs`` in the order of each epoch, int64 (n,) on the CPU."""
    for epoch in range(epochs):
        draw = stream(visit.seed, "shuffle", visit.round, visit.client, epoch, *later(visit))
        yield torch.from_numpy(draw.permutation(len(visit.y)))


def augmentation_stream(visit: Visit) -> torch.Generator:
    """Return the random generator for the augmentation in a visit.

    It lives on the CPU: a GPU would draw other numbers, and MPS has no float64. Its few numbers per image are copied.
    """
    return torch_stream(visit.seed, "augment", visit.round, visit.client, *later(visit))
