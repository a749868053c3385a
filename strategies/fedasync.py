"""FedAsync: each upload moves the global model at once, the less the staler it is."""

from pydantic import Field

from fedcross.strategies.method import Settings, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import AsyncSingle, AsyncState


class FedAsyncParams(Settings):
    beta: float = Field(0.6, gt=0, le=1)
    power: float = Field(0.5, ge=0)


class FedAsync(AsyncSingle[FedAsyncParams]):
    """Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019 (arXiv 1903.03934), with polynomial staleness.

    Each upload u sets ``w = (1 - b) w + b u`` with ``b = beta (s + 1)^-p``; its staleness s is the number of uploads
    that the server has taken since it sent the client its model. The global model is w.

    State: w and, for a restart, the older versions that are under way; clients keep none. Wire: one model down, one up.

    Deviations: clients train without the paper's proximal term (its weight may be 0). Batch-normalisation statistics
    are averaged with the same weights, counters truncated.
    """

    def take(self, state: AsyncState, upload: Upload, staleness: int) -> None:
        share = self.params.beta * (staleness + 1) ** -self.params.power
        state.model = weighted_mean([state.model, upload.arrays], [1 - share, share])
        state.version += 1
