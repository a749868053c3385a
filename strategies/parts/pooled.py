"""Base of methods with one model per slot: slot i goes to the i-th drawn client, the server recombines the uploads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, cast

from flwr.common.logger import log
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Method, Round, Start, Task, Upload
from fedcross.strategies.parts.corners import WidthPool
from fedcross.strategies.parts.widths import Widths, deal_slots, trainable_slots
from fedcross.strategies.pool.pool import Arrays, Layout, Pool, Storage, diagnostics
from fedcross.tasks.models.width import FULL, Corners, Width


class PooledParams(Settings):
    """Settings of every method with a pool.

    Parameters
    ----------
    diagnostics_every : int
        Rounds between measurements of ``pool_similarity_mean`` and ``pool_spread`` of the pool; 0 for never.
    storage : Storage
        When the pool is kept in a memory-mapped file, and where that file lies.
    """

    diagnostics_every: int = Field(1, ge=0)
    storage: Storage = Storage()


@dataclass
class PoolState:
    """The pool; its slots from the least to the most recently trained one; how many found no device this round."""

    pool: Pool
    queue: list[int]
    waiting: int = 0


Q = TypeVar("Q", bound=PooledParams, default=Any)
S = TypeVar("S", bound=PoolState, default=Any)


class Slots(Method[Q, S]):
    """Base of methods with one model per slot, K = ``clients_per_round`` slots.

    All slots start as copies of one initial model. The global model is their uniform mean. If fewer than K clients are
    connected, the least recently trained slots are sent.

    With ``params.widths`` slots have widths. A slot then goes only to a device that can hold it: drawn clients that
    are idle are replaced by others that can, and a slot without a device waits and comes first in the next round.
    """

    may_change = frozenset({"method.diagnostics_every", "method.storage"})

    def init(self, start: Start) -> S:
        """Return a pool of copies of the initial model."""
        pool = self.pool_of(start, start.clients_per_round)
        return cast("S", PoolState(pool, list(range(len(pool)))))

    def pool_of(self, start: Start, k: int) -> Pool:
        """Return a pool of k copies of the initial model, each of its slot's width."""
        layout, widths = Layout.of(start.arrays, start.parameters), self.slot_widths(k)
        if not widths:
            pool = Pool(layout, k, self.params.storage)
        elif start.corners is None:
            raise ConfigError(f"{type(self).__name__}: method.widths needs the network; use the command fedcross.")
        else:
            pool = WidthPool(layout, widths, start.corners, self.params.storage)
        pool.fill(start.arrays)
        return pool

    def slot_widths(self, k: int) -> list[Width]:
        """Return the width of each of k slots, the widest first; empty if all are full."""
        params: Any = self.params
        return params.slots(k) if isinstance(params, Widths) and params.widths else []

    def widths(self, corners: Corners | None = None) -> list[Width]:
        """Return the widths of the pool's models, the widest first; empty if all are full."""
        params: Any = self.params
        return [params.size(ratio) for ratio in sorted(getattr(params, "widths", ()), reverse=True)]

    def sample(self, state: S, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw clients; with widths, replace idle ones so that as many slots as possible find a device."""
        drawn = super().sample(state, round, available)
        if not isinstance(state.pool, WidthPool):
            return drawn
        free = sorted(set(available) - set(drawn))
        spare = [free[i] for i in stream(round.seed, "sample", round.number, 1).permutation(len(free))]
        while len(dealt := _deal(state, round, drawn)) < min(len(drawn), len(state.queue)):
            idle = next(i for i in reversed(range(len(drawn))) if drawn[i] not in dealt.values())
            changed = ((client, (*drawn[:idle], client, *drawn[idle + 1 :])) for client in spare)
            better = next((one for one in changed if len(_deal(state, round, one[1])) > len(dealt)), None)
            if better is None:
                break
            spare.remove(better[0])
            drawn = better[1]
        return drawn

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send the least recently trained slots, in the order of the slots, to the clients in the order of the draw."""
        pool, widths = state.pool, [FULL] * len(state.pool)
        if isinstance(pool, WidthPool):
            dealt, widths = _deal(state, round, round.clients), list(pool.widths)
        else:
            dealt = dict(zip(sorted(state.queue[: len(round.clients)]), round.clients))
        state.waiting = min(len(round.clients), len(pool)) - len(dealt)
        if state.waiting:
            log(
                WARNING,
                "fedcross: round %s: %s slots wait for a device that can hold them",
                round.number,
                state.waiting,
            )
        return [Task(dealt[slot], slot, pool.model(slot), width=widths[slot]) for slot in state.queue if slot in dealt]

    def global_model(self, state: S) -> Arrays:
        """Return the uniform mean of the slots."""
        return state.pool.mean()

    def evaluation(self, state: S) -> Evaluation:
        """Return the global model; with widths that of every width, each value the mean of the slots that have it."""
        if not isinstance(state.pool, WidthPool):
            return super().evaluation(state)
        return Evaluation([], {width: state.pool.mean_of(width) for width in reversed(state.pool.levels)})


class Pooled(Slots[Q, S]):
    """Base of pool methods that define :meth:`recombine`; a lost slot keeps its model."""

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write the uploads into their slots, recombine, and measure the new pool where that is due."""
        metrics = {"waiting_slots": float(state.waiting)} if state.waiting else {}
        if not (members := write(state, uploads)):
            return metrics
        self.recombine(state, round, members)
        every = self.params.diagnostics_every
        if not every or round.number % every:
            return metrics
        return metrics | diagnostics(state.pool.gram(columns=state.pool.layout.columns("parameters")))

    @abstractmethod
    def recombine(self, state: S, round: Round, members: list[int]) -> None:
        """Make the models of the next round; `members`, one slot or more, hold this round's uploads."""


def write(state: PoolState, uploads: list[Upload]) -> list[int]:
    """Write the uploads into their slots, move these to the end of the queue, and return them."""
    for upload in uploads:
        state.pool.write(upload.slot, upload.arrays)
    members = [upload.slot for upload in uploads]
    trained = set(members)
    state.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
    return members


def _deal(state: PoolState, round: Round, clients: Sequence[int]) -> dict[int, int]:
    """Return slot -> client for these clients, by slot; only a device that can hold a slot gets it."""
    pool: Any = state.pool
    budgets = {client: round.budget(client) for client in clients}
    slots = trainable_slots(state.queue, pool.widths, list(budgets.values()))
    return deal_slots(slots, pool.widths, clients, budgets)
