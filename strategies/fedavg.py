"""FedAvg: one global model, the mean of the clients' trained models, weighted by their numbers of examples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.method import Upload
from fedcross.strategies.parts.single_model import SingleModel


class FedAvgParams(Settings):
    """``weighting`` of the uploads in the mean: by number of ``examples`` (n_k, the paper) or ``uniform``."""

    weighting: Literal["examples", "uniform"] = Field("examples", description="weight of an upload in the mean")


class FedAvg(SingleModel[FedAvgParams]):
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    ``G <- sum_k n_k w_k / sum_k n_k`` over this round's uploads.

    State: the global model; clients keep none. Wire: one model down, one up.
    """

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return n_k, or 1 for a uniform mean."""
        if self.params.weighting == "uniform":
            return [1.0] * len(uploads)
        return super().weights(uploads)
