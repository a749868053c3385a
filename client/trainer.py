"""The training loop of one client: the loss of a batch, called or compiled, and the optimiser on the flat row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor
from torch.nn import functional
from torch.utils._triton import has_triton

from fedcross.client.device import breaks_device, out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Train
from fedcross.core.randomness import stream, torch_stream
from fedcross.strategies.objective import Batch, Objective, Prepared, Trained, Visit

Augment = Callable[[Tensor, torch.Generator], Tensor]
#: ``train.compile=auto`` compiles in runs of at least so many rounds: compiling takes up to a minute.
ROUNDS = 100


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

    The optimiser is ``torch.optim``'s (:func:`step`); its state starts at zero unless the visit brings a momentum
    buffer. With `clip`, the norm of the gradient (the objective's term included) is first limited to that value.
    A generator keyed by (seed, round, client, epoch, exchange) shuffles the examples in each epoch; a short last batch
    is kept.

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
    planned = settings.epochs * -(-len(visit.y) // settings.batch)
    steps = seen = 0
    for x, y, rows in batches(visit, settings.epochs, settings.batch):
        inputs = net.arrange(augment(x, generator)) if augment and generator else x
        compute: Callable[..., Tensor] = called
        number: int | Tensor = steps
        if compiled is not None and len(y) == settings.batch:
            compute, number = compiled, torch.tensor(steps, device=net.device)  # a number would be compiled in
        before = [buffer.clone() for buffer in net.module.buffers()] if objective.ascent else []
        net.gradient.zero_()
        loss = compute(inputs, y, rows, number, prepared)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * len(y)
        if objective.ascent and (way := objective.ascent(net.flat, net.gradient, prepared)) is not None:
            _ascend(net, objective, Batch(inputs, y, rows=rows, step=steps), prepared, before, way)
        with torch.no_grad():
            term = objective.gradient(net.flat, prepared) if objective.gradient else None
            now = lr * objective.rate(steps, planned) if objective.rate else lr
            step(net.flat, net.gradient, moments, now, settings, steps, term)
        steps += 1
        seen += len(y)
    mean = float(total) / max(seen, 1)
    return Trained(net.params, net.buffers, net.flat, moments.first, steps, mean)


# ---- the loss --------------------------------------------------------------------------------------------------------


def loss_of(net: ModuleNet, objective: Objective) -> Callable[..., Any]:
    """Return the loss of one batch of the model loaded in `net`, as a function of the batch and the prepared values."""
    cross_entropy = type(objective).loss is Objective.loss

    def loss(x: Tensor, y: Tensor, rows: Tensor, number: int | Tensor, prepared: Prepared) -> Tensor:
        if cross_entropy:  # the default, without a call into another file at every step
            return functional.cross_entropy(net.scores(x), y, reduction="none").mean()
        return objective.loss(net, net.params, net.buffers, Batch(x, y, rows=rows, step=number), prepared)

    return loss


def is_compiled(choice: bool | str, device: torch.device, rounds: int) -> bool:
    """Return whether ``train.compile`` = `choice` compiles the step; ``auto`` does in long runs on a CUDA device."""
    if choice == "auto":
        return device.type == "cuda" and rounds >= ROUNDS and has_triton()
    return bool(choice)


class Compiled:
    """A function of tensors, compiled at its first call; where that fails, it is called as it is from then on.

    Inductor fuses the small kernels of a step. On a GPU it also records them as CUDA graphs.

    Parameters
    ----------
    function : callable
        Must compute the same in every call with equal arguments. Tensors that it returns are valid until the next call.
    device : torch.device
        Where it computes.
    backend : str
        Of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, backend: str = "inductor") -> None:
        self.function = function
        mode = "reduce-overhead" if device.type == "cuda" and backend == "inductor" else None
        self._compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)
        #: Why the function is not compiled; empty while it is.
        self.refused = ""

    def __call__(self, *args: Any) -> Any:
        """Return ``function(*args)``."""
        if self.refused:
            return self.function(*args)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            return self._compiled(*args)
        except Exception as error:  # whatever the compiler raises: a mistake of the function shows in the call below
            if breaks_device(error) or out_of_memory(error):
                raise
            self.refused = (str(error).strip().splitlines() or [type(error).__name__])[0]
        result = self.function(*args)
        log(WARNING, "fedcross: steps run uncompiled: %s. train.compile=false avoids the attempt.", self.refused)
        return result


def _ascend(
    net: ModuleNet, objective: Objective, batch: Batch, prepared: Prepared, before: list[Tensor], way: Tensor
) -> None:
    """Replace ``net.gradient`` by the gradient at ``net.flat + way``; everything else stays.

    `before` holds the module's buffers as they were before the first pass, among them the states of dropout layers.
    """
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


# ---- the optimiser ---------------------------------------------------------------------------------------------------


@dataclass
class Moments:
    """What an optimiser keeps between steps.

    Attributes
    ----------
    first : Tensor, shape (..., p)
        SGD's momentum buffer, or Adam's mean of gradients.
    second : Tensor, shape (..., p) or (..., 0)
        Adam's mean of squared gradients; empty for SGD.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, flat: Tensor, settings: Train, momentum: Tensor | None = None) -> Moments:
        """Return zeros for parameters `flat` (..., p); `momentum` replaces the first moment."""
        first = torch.zeros_like(flat) if momentum is None else momentum.clone()
        second = flat.new_zeros(*flat.shape[:-1], 0) if settings.optimizer == "sgd" else torch.zeros_like(flat)
        return cls(first, second)


def step(
    flat: Tensor,
    gradient: Tensor,
    moments: Moments,
    lr: float | Tensor,
    settings: Train,
    number: int = 0,
    term: Tensor | None = None,
) -> None:
    """Take one step of one model, or of many at once, in place, as ``torch.optim`` does; overwrites `gradient`.

    Parameters
    ----------
    flat, gradient : Tensor, shape (..., p)
        Parameters and the gradient of the loss.
    moments : Moments
        State of the optimiser.
    lr : float or Tensor
        Learning rate; a tensor () for one model, (..., 1) for one rate per model.
    settings : Train
        Optimiser, momentum, betas, weight decay, clipping.
    number : int
        Number of the step within the visit, from 0.
    term : Tensor, shape (..., p), optional
        The objective's own term of the gradient (:meth:`strategies.objective.Objective.gradient`).
    """
    if term is not None:
        gradient.add_(term)
    if settings.clip is not None:
        gradient.mul_((settings.clip / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0))
    if settings.weight_decay and settings.optimizer == "adamw":
        flat.mul_(1 - lr * settings.weight_decay)
    elif settings.weight_decay:
        gradient.add_(flat, alpha=settings.weight_decay)
    if settings.optimizer != "sgd":
        _adam(flat, gradient, moments, lr, settings, number + 1)
        return
    if settings.momentum:
        gradient = moments.first.mul_(settings.momentum).add_(gradient)
    if not isinstance(lr, Tensor):
        flat.add_(gradient, alpha=-lr)
    elif lr.dim() == 0:  # to the bit the same on a CPU, and no copy to the host on a GPU
        flat.addcmul_(gradient, lr, value=-1)
    else:
        flat.sub_(gradient * lr)


def _adam(flat: Tensor, gradient: Tensor, moments: Moments, lr: float | Tensor, settings: Train, number: int) -> None:
    """Take step `number` (from 1) of Adam (Kingma and Ba 2015), in ``torch.optim``'s order of operations."""
    one, two = settings.betas
    moments.first.lerp_(gradient, 1 - one)
    moments.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
    scale = (moments.second.sqrt() / (1 - two**number) ** 0.5).add_(settings.eps)
    length = lr / (1 - one**number)
    if isinstance(length, Tensor):
        flat.addcdiv_(moments.first * length, scale, value=-1)
    else:
        flat.addcdiv_(moments.first, scale, value=-length)


# ---- the order of the examples ---------------------------------------------------------------------------------------


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
