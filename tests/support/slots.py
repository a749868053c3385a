"""A method with three slots among six clients, and its grid in virtual time."""

import numpy as np

from fedcross.core.randomness import stream
from fedcross.strategies.fedcross import FedCross
from tests.support.virtual import VirtualGrid

MODEL = {"w": np.zeros(3, np.float32)}


def federation(clock, scripts, clients=6, kind=FedCross, **rules):
    """Return a method with three slots and its grid."""
    own = {"selection": "in_order", "alpha": 0.5} if kind is FedCross else {}
    method = kind(**own, **{"clients_per_round": 3, "nonce": True, "deadline_s": 100, "run": "r", **rules})
    method.begin(MODEL)
    return method, VirtualGrid(clock, clients, scripts)


def drawn(method):
    return method.sample(1, range(6))


def spares(method):
    """Return the spare clients in the order in which they are asked."""
    free = sorted(set(range(6)) - set(drawn(method)))
    return [free[i] for i in stream(method.federation.seed, "spares", 1, 0).permutation(len(free))]
