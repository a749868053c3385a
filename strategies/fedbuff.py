"""FedBuff: the server collects B updates, then takes one step."""

from dataclasses import dataclass, field
from logging import WARNING

import numpy as np
from flwr.common.logger import log
from pydantic import Field

from fedcross.strategies.method import Round, Settings, Start, Upload
from fedcross.strategies.parts.single_model import AsyncSingle, AsyncState
from fedcross.strategies.pool.mixing import truncated
from fedcross.strategies.wire.records import Array, Arrays


class FedBuffParams(Settings):
    buffer: int = Field(10, ge=1)
    server_lr: float = Field(1.0, gt=0)


@dataclass
class FedBuffState(AsyncState):
    total: Arrays = field(default_factory=dict)
    count: int = 0


class FedBuff(AsyncSingle[FedBuffParams, FedBuffState]):
    """Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.

    An upload u is an update ``d = u - w_sent`` to the model that its client got, times ``1/sqrt(1 + s)``; its staleness
    s is the number of server steps since. When B updates are there, ``w += eta_g mean(d)``. The global model is w.

    State: w, the sum of the buffered updates, for a restart the older versions under way. Wire: one model down, one up.

    Deviations: no secure aggregation. Batch-normalisation statistics are weights; counters are truncated.
    """

    def init(self, start: Start) -> FedBuffState:
        model = super().init(start).model
        return FedBuffState(model, total=empty(model))

    @np.errstate(over="ignore", invalid="ignore")  # the evaluation of a model that is not finite ends the run
    def take(self, state: FedBuffState, upload: Upload, staleness: int) -> None:
        share, sent = 1 / float(np.sqrt(1 + staleness)), upload.task.arrays
        for name, total in state.total.items():
            total += share * (upload.arrays[name].astype(total.dtype) - sent[name].astype(total.dtype))
        state.count += 1
        if state.count >= self.params.buffer:
            step = self.params.server_lr / state.count
            state.model = {name: _stepped(array, step, state.total[name]) for name, array in state.model.items()}
            state.version += 1
            state.total, state.count = empty(state.model), 0

    def aggregate(self, state: FedBuffState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the uploads; warn if the run ends with the model with which it began."""
        metrics = super().aggregate(state, round, uploads)
        if round.last and round.number == round.rounds and state.count and not state.version:
            why = "the server has taken no step, the model is the initial one: %d accepted updates, method.buffer=%d."
            log(WARNING, f"fedcross: {why} Lower method.buffer, or raise rounds.", state.count, self.params.buffer)
        return metrics


def _stepped(array: Array, step: float, total: Array) -> Array:
    """Return ``array + step total`` in the dtype of `array`; integers are truncated, and unchanged if `total` is 0."""
    moved = np.asarray(array + step * total)
    if array.dtype.kind == "f":
        return moved.astype(array.dtype)
    return np.where(total == 0, array, truncated(moved).astype(array.dtype))  # an int64 may not fit float64


def empty(model: Arrays) -> Arrays:
    """Return a sum of no updates: float entries in their dtype, integers in float64."""
    return {name: np.zeros(a.shape, a.dtype if a.dtype.kind == "f" else np.float64) for name, a in model.items()}
