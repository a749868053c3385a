"""Centralized: one model trained on all clients' data together; an upper bound for federated methods."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcross.strategies.method import Round, Settings, Task
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all


class UnionOfData(Objective[Settings]):
    """Cross-entropy on examples drawn from all clients' data together."""

    pooled = True
    needs = frozenset({"pooled-share"})


@dataclass
class CentralizedState(ModelState):
    share: float = 1.0


class Centralized(SingleModel[Settings, CentralizedState]):
    """One model trained on the union of all clients' data, a reference rather than a federated method.

    Each round one client process draws the share K / N of all examples, without replacement, and trains on them for the
    usual epochs: on average the steps of K clients of any other method. Optimiser and learning rate are those of the
    clients. It needs a process that holds all data, so it runs in simulation only.

    State: the global model. Wire: one model down and one up per round.
    """

    comparable = False
    Objective = UnionOfData

    def sample(self, state: CentralizedState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Return the first client of the usual draw, which does the work of all drawn clients."""
        drawn = round.clients
        state.share = len(drawn) / len(available)
        return drawn[:1]

    def dispatch(self, state: CentralizedState, round: Round) -> list[Task]:
        return to_all(state.model, round, config={"pooled-share": state.share}, fixed=True)
