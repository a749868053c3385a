"""FedExg: models train at home, then at a random other client, then they are averaged."""

from __future__ import annotations

from fedcross.strategies.parts.cross_training import CrossTraining, CrossTrainingParams


class FedExg(CrossTraining[CrossTrainingParams]):
    """Exchange by a random permutation, cross-entropy only; a baseline in FedCT's tables (Qi et al., 2024).

    Its own paper was not found; inferred from FedCT's text: FedCT without its three modules. The permutation is uniform
    among those that move every model. A model trains for ``train.epochs`` at home and as many at the host
    (``host_epochs`` changes that), twice FedAvg's work per round.

    State: the global model. Wire: N_e + 1 models down and up, nothing else.
    """
