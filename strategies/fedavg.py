"""FedAvg: one global model, the mean of the clients' trained models, weighted by their numbers of examples."""

from typing import Literal

from fedcross.core.settings import Settings
from fedcross.strategies.parts.single_model import SingleModel


class FedAvgParams(Settings):
    weighting: Literal["examples", "uniform"] = "examples"


class FedAvg(SingleModel[FedAvgParams]):
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    ``G <- sum_k n_k w_k / sum_k n_k`` over this round's uploads.

    State: the global model; clients keep none. Wire: one model down, one up.
    """
