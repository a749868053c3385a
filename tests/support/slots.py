"""A run with three slots among six clients, and its grid in virtual time."""

import numpy as np

from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Start
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from tests.support.virtual import VirtualGrid

MODEL = {"w": np.zeros(3, np.float32)}


def federation(clock, scripts=None, clients=6, kind=FedCross, log=None, seconds=None, ended=None, **values):
    """Return the driver of a run and its grid; `values` are settings of the method or of the rounds.

    `seconds` is the run's clock, and the list `ended` gets a line for every visit that ends.
    """
    own = {"selection": "in_order", "alpha": 0.5} if kind is FedCross else {}
    own |= {name: values.pop(name) for name in list(values) if name in kind.Params.model_fields}
    settings = RoundSettings(**{"clients_per_round": 3, "nonce": True, "deadline_s": 100, "run": "r", **values})
    start = Start(MODEL, tuple(MODEL), settings.clients_per_round, settings.rounds, settings.seed)

    def tell(event, fields):
        if event == "visit_ended" and ended is not None:
            ended.append(dict(fields))

    run = open_run(kind(**own), start, settings, log=log, clock=seconds, tell=tell, watches={"visit_ended"})
    return run, VirtualGrid(clock, clients, scripts or {})


def asked(grid):
    """Return the clients in the order in which they were asked."""
    return [client for _, client, _ in grid.asked]


def drawn(number=1, **values):
    """Return the clients that a run like this one draws in a round."""
    from fedcross.core.randomness import stream

    return [int(one) for one in stream(values.get("seed", 0), "sample", number).choice(6, size=3, replace=False)]


def spares(number=1):
    """Return the spare clients of a round in the order in which they are asked."""
    from fedcross.core.randomness import stream

    free = sorted(set(range(6)) - set(drawn(number)))
    return [free[i] for i in stream(0, "spares", number, 0).permutation(len(free))]
