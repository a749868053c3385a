"""Quantity skew: the same distribution for everybody, but sizes drawn from a Dirichlet distribution.

Source: Q. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.tasks.base import Partition, Task
from fedcross.tasks.partition._common import ClientsParams, enough, owned


class Params(ClientsParams):
    """Settings of quantity skew.

    Attributes
    ----------
    beta : float
        Concentration, above 0: small gives few large and many small clients.
    min_size : int
        Smallest number of examples a client may hold.
    max_draws : int
        Give up after this many draws of the sizes.
    """

    beta: float = Field(default=0.5, gt=0)
    min_size: int = Field(default=10, ge=1)
    max_draws: int = Field(default=1000, ge=1)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint random sets, each of at least ``min_size`` examples, whose union is the training set.

    Raises
    ------
    DataError
        If there are fewer than N * min_size examples, or no draw of ``max_draws`` leaves everybody enough.
    """
    n, N = len(task.train), params.clients
    enough(n, N, params.min_size)
    for attempt in range(params.max_draws):
        generator = stream(seed, "partition quantity_skew", attempt)
        p = generator.dirichlet(np.full(N, params.beta))
        cuts = (np.cumsum(p) * n).astype(np.int64)[:-1]
        if np.diff(cuts, prepend=0, append=n).min() >= params.min_size:
            return Partition(train=owned(np.split(generator.permutation(n), cuts)))
    raise DataError(
        f"quantity_skew: {params.max_draws} draws with beta={params.beta} gave no sizes of at least {params.min_size} "
        f"for {N} clients. Lower partition.clients or partition.min_size, or raise partition.beta."
    )
