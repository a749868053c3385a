"""FedBuff: the server collects B updates, then takes one step."""

from __future__ import annotations

from logging import WARNING

import numpy as np
from flwr.common.logger import log
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.asynchronous.single import AsyncSingle
from fedcross.strategies.parts.averaging import truncated
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Upload
from fedcross.strategies.wire.records import Arrays


class FedBuffParams(Settings):
    """Settings of FedBuff.

    Parameters
    ----------
    buffer : int
        B: updates that make a step of the server.
    server_lr : float
        eta_g: length of that step.
    """

    buffer: int = Field(10, ge=1)
    server_lr: float = Field(1.0, gt=0)


class FedBuff(AsyncSingle[FedBuffParams]):
    """Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.

    An upload u is an update ``d = u - w_sent`` to the model that its client got, times ``1/sqrt(1 + s)``; its staleness
    s is the number of server steps since. When B updates are there, ``w += eta_g mean(d)``. The global model is w.

    State: w, the sum of the buffered updates and, for a restart, the older versions that are under way; clients keep
    none. Wire: one model down, one up.

    Choices and deviations: batch-normalisation statistics are treated as weights are; counters are summed in float64
    and truncated. The paper's secure aggregation and privacy are not part of this.
    """

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model and an empty buffer."""
        super().setup(arrays)
        self._empty()

    def _empty(self) -> None:
        kinds = {name: a.dtype if a.dtype.kind == "f" else np.dtype(np.float64) for name, a in self.model.items()}
        self.sum: Arrays = {name: np.zeros(a.shape, kinds[name]) for name, a in self.model.items()}
        self.count = 0

    @np.errstate(over="ignore", invalid="ignore")  # the evaluation of a model that is not finite ends the run
    def take(self, upload: Upload, sent: Arrays, staleness: int) -> None:
        """Add the update to the buffer; take a step if it is full."""
        share = 1 / float(np.sqrt(1 + staleness))
        for name, total in self.sum.items():
            total += share * (upload.arrays[name].astype(total.dtype) - sent[name].astype(total.dtype))
        self.count += 1
        if self.count < self.params.buffer:
            return
        step = self.params.server_lr / self.count
        moved = {name: array + step * self.sum[name] for name, array in self.model.items()}
        self.model = {
            name: np.asarray(moved[name]).astype(array.dtype)
            if array.dtype.kind == "f"
            else np.where(self.sum[name] == 0, array, truncated(moved[name], array.dtype))  # float64 lacks large ones
            for name, array in self.model.items()
        }
        self.version += 1
        self._empty()

    def measure(self, number: int) -> dict[str, float]:
        """Say so if the run ends with the model with which it began, as lost visits do not fill the buffer."""
        if number == self.federation.rounds and self.count and not self.version:
            log(
                WARNING,
                "fedcross: the server has taken no step: %d accepted updates, method.buffer=%d. So the model is as it "
                "began. Lower method.buffer, or raise rounds.",
                self.count, self.params.buffer,
            )  # fmt: skip
        return super().measure(number)

    def state(self) -> State:
        """Return the models and the buffer."""
        state = super().state()
        state.arrays |= {f"sum.{name}": array for name, array in self.sum.items()}
        state.values["count"] = self.count
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.sum = {name: state.arrays[f"sum.{name}"].copy() for name in self.spec}
        self.count = int(state.values["count"])
