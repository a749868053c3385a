"""Centralized: one model trained on all clients' data together; an upper bound for federated methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Task
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all


class Pooled(Objective[Settings]):
    """Cross-entropy on examples drawn from all clients' data together."""

    pooled = True
    needs = frozenset({"pooled-share"})


@dataclass
class CentralizedState(ModelState):
    """The global model, and the share of all data that this round draws."""

    share: float = 1.0


class Centralized(SingleModel[Settings, CentralizedState]):
    """One model trained on the union of all clients' data, a reference rather than a federated method.

    Each round one client process draws the share K / N of all examples, without replacement, and trains on them for the
    usual epochs: on average the steps of K clients of any other method. With K = N it is ordinary training on the whole
    set. Optimiser and learning rate are those of the clients; momentum starts at zero each round. It needs a process
    that holds all data, so it runs in simulation only.

    State: the global model. Wire: one model down and one up per round, which says nothing about a federated method.
    """

    #: There is only one upload, so the defence has nothing to compare it with.
    comparable = False

    Objective = Pooled
    State = CentralizedState

    def sample(self, state: CentralizedState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Return the first client of the usual draw, which does the work of all drawn clients."""
        drawn = super().sample(state, round, available)
        state.share = len(drawn) / len(available)
        return drawn[:1]

    def dispatch(self, state: CentralizedState, round: Round) -> list[Task]:
        """Send the model to that client, and the share of all data that it must draw."""
        return to_all(state.model, round, config={"pooled-share": state.share}, fixed=True)
