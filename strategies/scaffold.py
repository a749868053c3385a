"""SCAFFOLD: local gradients corrected by control variates, one on the server and one kept by every client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.defence.rules import IDLE, Judgement, lower_median
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.momentum import effective_steps
from fedcross.strategies.parts.objective import (
    Objective,
    Outcome,
    Prepared,
    Tensors,
    Trained,
    Visit,
    as_arrays,
    as_tensors,
    flatten,
    unflatten,
)
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, Spec


class ScaffoldParams(Settings):
    """Settings of SCAFFOLD.

    Attributes
    ----------
    weighting : {"uniform", "examples"}
        Weight of an upload in the model's mean; the paper's is uniform.
    server_lr : float
        Global step size: ``G += server_lr (mean - G)`` for parameters.
    steps : {"momentum", "plain"}
        The number by which a client divides its drift: the effective number of steps under momentum, or the plain
        number of steps (the paper, which has no momentum). Without momentum the two are equal.
    momentum : float
        The local optimiser's momentum, ``train.momentum``.
    """

    weighting: Literal["uniform", "examples"] = "uniform"
    server_lr: float = Field(1.0, gt=0)
    steps: Literal["momentum", "plain"] = "momentum"
    momentum: float = Field(0.0, ge=0, lt=1)

    def remarks(self) -> list[str]:
        """Return what is allowed but unusual."""
        if self.steps == "plain" and self.momentum:
            return [
                f"method.steps=plain with train.momentum={self.momentum}: control variates come out up to "
                f"{1 / (1 - self.momentum):.1f} times too long."
            ]
        return []


class Controlled(Objective[ScaffoldParams]):
    """Cross-entropy whose gradient is corrected by ``c - c_i``."""

    keeps = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return G, c, c_i and ``c - c_i``, each flat (p,)."""
        start = flatten(visit.params)
        control = _in_order(visit.extras["control"], visit.params)
        own = _in_order(visit.state, visit.params) if visit.state else torch.zeros_like(start)
        return {"start": start, "control": control, "own": own, "correction": control - own}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``c - c_i``."""
        correction: Tensor = prepared["correction"]
        return correction

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``c_i+ = c_i - c + (G - w) / (steps lr)`` and send ``c_i+ - c_i``."""
        own = self.params
        steps = effective_steps(trained.steps, own.momentum if own.steps == "momentum" else 0.0)
        new = prepared["own"] - prepared["control"] + (prepared["start"] - trained.flat.detach()) / (steps * visit.lr)
        change = unflatten(new - prepared["own"], visit.params)
        return Outcome({"control": as_arrays(change)}, as_arrays(unflatten(new, visit.params)))


def _in_order(arrays: Arrays, like: Tensors) -> Tensor:
    """Return `arrays` as one flat tensor in the order of `like`, on its device."""
    tensors = as_tensors(arrays, like=next(iter(like.values())))
    return flatten({name: tensors[name] for name in like})


def _length(arrays: Arrays) -> float:
    """Return the Euclidean norm over all of `arrays`, in float64, summed in the order of their names."""
    return math.sqrt(sum(float(np.square(arrays[name], dtype=np.float64).sum()) for name in sorted(arrays)))


def _usual(lengths: Mapping[int, float]) -> float:
    """Return the lower median of the finite `lengths` that are not next to nothing beside the others'; 0 for none."""
    known = [length for length in lengths.values() if math.isfinite(length)]
    return lower_median([one for one in known if not one < IDLE * lower_median(known)]) if known else 0.0


class Scaffold(SingleModel[ScaffoldParams]):
    """Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.

    Client i steps along ``g - c_i + c`` and then sets ``c_i+ = c_i - c + (G - w_i) / (tau lr)``, tau its steps. The
    server sets ``G += server_lr (mean w_i - G)`` and ``c += sum_i (c_i+ - c_i) / N``. All variates start at zero.

    State: the global model and ``sum_i c_i`` over all clients, from which ``c = sum / N``; every client keeps c_i (one
    model of parameters on its disk). Wire: the model and c down, the model and ``c_i+ - c_i`` up: two models each way,
    less the statistics of batch normalisation, which have no variates and are averaged as in FedAvg.

    N is the largest number of clients that were ever connected at a draw, so a federation that is still growing keeps
    the invariant ``c = mean c_i``.

    Deviations: with momentum rho the drift is divided by the effective number of steps
    ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``, for G - w is that many gradients long and c_i would otherwise
    be up to 1 / (1 - rho) times too large (the paper has no momentum). Weight decay is part of what c_i measures, as in
    all public code. If a client fails in a round, its c_i and the server's sum stay unchanged. A client that loses its
    disk starts again at zero, and its old share stays in the sum.

    With ``defence.enabled`` the server keeps every client's c_i, one model of parameters each, in memory and in
    checkpoints, and c is the mean of these, each shortened to their median length. So no client moves c by more than
    that over N, however often it takes part, and a false c_i has no more weight than an honest one. Where the server
    shortens a long update of the model, c_i still measures the whole way. Only updates of a million medians are
    quarantined: a client whose c_i does not fit yet sends long ones, and lost ones would never mend it.
    """

    Objective = Controlled
    unusual = 1e6

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; all control variates are zero."""
        super().setup(arrays)
        self.total: Arrays = {name: np.zeros_like(arrays[name]) for name in self.parameter_names}
        self.population = 0
        self.kept: dict[int, Arrays] = {}

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and store the largest number of connected clients so far."""
        self.population = max(self.population, len(available))
        return super().sample(number, available)

    def control(self) -> Arrays:
        """Return c, the mean of all clients' control variates."""
        count, total = max(self.population, 1), self.total
        if self._defending:
            lengths = self._lengths()
            limit = _usual(lengths)
            for client, length in lengths.items():
                share = min(limit / length, 1.0) if length else 1.0
                total = {n: np.asarray(array + share * self.kept[client][n]) for n, array in total.items()}
        return {name: np.divide(array, count, dtype=array.dtype) for name, array in total.items()}

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model and c to every client of the round."""
        payloads = super().dispatch(current)
        control = self.control()
        for payload in payloads:
            payload.extras = {"control": control}
        return payloads

    def upload_extras(self, payload: Payload) -> dict[str, Spec]:
        """Expect the change of the client's control variate, shaped as the parameters."""
        return {"control": {name: self.spec[name] for name in self.parameter_names}}

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return 1 for each upload, or its number of examples."""
        return super().weights(uploads) if self.params.weighting == "examples" else [1.0] * len(uploads)

    def judge_extras(self, uploads: list[Upload]) -> Judgement:
        """Quarantine what is infinite, and count control variates much longer than the others', which c shortens."""
        new = {upload.client: _length(self._variate(upload)) for upload in uploads}
        limit = self.federation.defence.quarantine * _usual({**self._lengths(), **new})
        sound = [upload for upload in uploads if math.isfinite(new[upload.client])]
        unsound = [(upload, math.inf, limit) for upload in uploads if not math.isfinite(new[upload.client])]
        return Judgement(sound, unsound, sum(new[upload.client] > limit for upload in sound))

    def _lengths(self) -> dict[int, float]:
        """Return the length of every control variate that the server keeps, client -> length, by client.

        The order is that of the sums in :meth:`control`, so a resumed run must find the same.
        """
        return {client: _length(self.kept[client]) for client in sorted(self.kept)}

    def _variate(self, upload: Upload) -> Arrays:
        """Return the client's c_i+, as far as the server knows what c_i was."""
        change, old = upload.extras["control"], self.kept.get(upload.client)
        return {n: np.array(a) if old is None else np.add(old[n], a) for n, a in change.items()}

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Move the global model towards the uploads' mean, and add the changes of their control variates."""
        if not uploads:
            return {}
        mean = weighted_mean([upload.arrays for upload in uploads], self.weights(uploads))
        if self.params.server_lr != 1:
            for name in self.parameter_names:
                step = np.multiply(np.subtract(mean[name], self.model[name]), self.params.server_lr)
                mean[name] = np.asarray(np.add(self.model[name], step), dtype=mean[name].dtype)
        self.model = mean
        if self._defending:  # `total` holds what a checkpoint of an older version knew, if anything
            self.kept |= {upload.client: self._variate(upload) for upload in uploads}
            return {}
        self.total = {
            name: np.asarray(np.sum([array, *(u.extras["control"][name] for u in uploads)], axis=0, dtype=array.dtype))
            for name, array in self.total.items()
        }
        return {}

    def state(self) -> State:
        """Return the global model, the control variates' sum (with the defence each too) and the number of clients."""
        state = super().state()
        state.arrays |= {f"control.{name}": array for name, array in self.total.items()}
        for client, variate in self.kept.items():
            state.arrays |= {f"kept.{client}.{name}": array for name, array in variate.items()}
        state.values["population"] = self.population
        return state

    def restore(self, state: State) -> None:
        """Take over what :meth:`state` returned."""
        super().restore(state)
        self.total = {name: state.arrays[f"control.{name}"] for name in self.parameter_names}
        self.population = int(state.values["population"])
        self.kept = {}
        for name, array in state.arrays.items():
            kind, _, rest = name.partition(".")
            client, _, parameter = rest.partition(".")
            if kind == "kept" and client.isdecimal() and parameter in self.total:
                self.kept.setdefault(int(client), {})[parameter] = array
