"""One step of stacked models: ``vmap`` of an objective's loss over the clients, then SGD on (K, p)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedcross.client.batched.masked_norm import masked
from fedcross.client.batched.state import StackedPrepared, StackedState
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import step as sgd_step
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Batch, Objective, Prepared, Tensors


@dataclass(frozen=True)
class Step:
    """The batches of k clients: inputs (k, width, ...), labels, mask of real rows, and rows of ``visit.inputs``."""

    number: int | Tensor
    x: Tensor
    y: Tensor
    mask: Tensor
    rows: Tensor


class StackedStepper:
    """The step of a method on a network.

    Parameters
    ----------
    net, objective, settings
        As for :func:`client.batched.trainer.train_batched`.
    like : Tensors
        One client's parameters.
    prepared : Prepared
        One client's prepared values.
    stacked : StackedPrepared
        All clients', for their structure.
    padded : bool
        Whether batches have padding, which the objective has to leave out.
    recorded : bool
        Whether steps are recorded: batch normalisation leaves the padding out too, and the backward pass is autograd's
        own, in place of ``torch.func.grad``'s under ``vmap``, which calls more operations.
    """

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        settings: Train,
        like: Tensors,
        prepared: Prepared,
        stacked: StackedPrepared,
        *,
        padded: bool,
        recorded: bool,
    ) -> None:
        self._net, self._objective, self._settings, self._like = net, objective, settings, like
        self._stacked, self._padded, self._recorded = stacked, padded, recorded
        self._modules = [net.module, *(corner.module for corner in net.corners)]
        # `gradient` returns None for a method without a closed-form term, and vmap cannot return None.
        one = torch.cat([p.reshape(-1) for p in like.values()])
        self._has_term = objective.gradient(one, prepared) is not None
        self._ascends = objective.ascent(one, torch.zeros_like(one), prepared) is not None

    def advance(
        self,
        state: StackedState,
        prepared: StackedPrepared,
        step: Step,
        trains: Tensor | None = None,
        seen_slopes: Tensor | None = None,
    ) -> None:
        """Run one step in place on `state`, which holds exactly the clients of `step`.

        Clients for which `trains`, bool (k,), is false stay as they are. `seen_slopes` (k, p) takes the gradients.
        """
        params = state.params(self._like)
        losses, slopes, fresh = self.slopes(params, state.buffers, prepared, step)
        gradient = torch.cat([slopes[name].reshape(len(losses), -1) for name in params], 1)
        if self._ascends:
            way = vmap(self._ascent, (0, 0, prepared.dims))(state.flat, gradient, prepared.leaves)
            there = replace(state, flat=state.flat + way).params(self._like)
            _, slopes, _ = self.slopes(there, state.buffers, prepared, step)
            gradient = torch.cat([slopes[name].reshape(len(losses), -1) for name in params], 1)
        if seen_slopes is not None:
            seen_slopes.copy_(gradient)
        term = vmap(self._term, (0, prepared.dims))(state.flat, prepared.leaves) if self._has_term else None
        held = None if trains is None else (state.flat.clone(), state.momentum.clone())
        sgd_step(state.flat, gradient, state.momentum, state.lr, self._settings, term)
        seen = losses * step.mask.sum(1)
        if trains is not None and held is not None:
            for now, old in zip((state.flat, state.momentum), held):
                now.copy_(torch.where(trains[:, None], now, old))
            fresh = {n: torch.where(_like(trains, new), new, state.buffers[n]) for n, new in fresh.items()}
            seen = torch.where(trains, seen, 0)
        for name, buffer in state.buffers.items():
            buffer.copy_(fresh[name])
        state.total.add_(seen)

    def slopes(
        self, params: Tensors, buffers: Tensors, prepared: StackedPrepared, step: Step
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return losses (k,), gradients by name (k, ...) and the new buffers."""

        def loss(
            p: Tensors,
            b: Tensors,
            x: Tensor,
            y: Tensor,
            mask: Tensor,
            rows: Tensor,
            leaves: list[Any],
        ) -> tuple[Tensor, Tensors]:
            changed = {name: buffer.clone() for name, buffer in b.items()}
            batch = Batch(x, y, mask if self._padded else None, rows, step.number)
            with masked(self._modules, mask) if self._recorded else nullcontext():
                return self._objective.loss(self._net, p, changed, batch, self._stacked.tree(leaves)), changed

        dims = (0, 0, 0, 0, 0, 0, prepared.dims)
        others = (buffers, step.x, step.y, step.mask, step.rows, prepared.leaves)
        if not self._recorded:
            slopes, (losses, fresh) = vmap(grad_and_value(loss, has_aux=True), dims)(params, *others)
            return losses, slopes, fresh
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            losses, fresh = vmap(loss, dims)(leaves, *others)
            found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return losses.detach(), dict(zip(leaves, found)), {name: buffer.detach() for name, buffer in fresh.items()}

    def _term(self, flat: Tensor, leaves: list[Any]) -> Tensor:
        term = self._objective.gradient(flat, self._stacked.tree(leaves))
        return term if term is not None else torch.zeros_like(flat)

    def _ascent(self, flat: Tensor, gradient: Tensor, leaves: list[Any]) -> Tensor:
        way = self._objective.ascent(flat, gradient, self._stacked.tree(leaves))
        return way if way is not None else torch.zeros_like(flat)


def _like(trains: Tensor, values: Tensor) -> Tensor:
    """Return `trains` (k,) with further axes of length 1, as many as `values` has."""
    return trains.view(-1, *[1] * (values.dim() - 1))
