"""Bases of methods with one model per slot, K = ``clients_per_round`` slots: by rounds, or upload by upload."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.common.logger import log
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Round, Start, Task, Upload
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.single_model import Stateful
from fedcross.strategies.parts.widths import Nested, Widths, assign
from fedcross.strategies.pool.mixing import Matrix, diagnostics
from fedcross.strategies.pool.pool import Array, Arrays, Integers, Layout, Pool
from fedcross.tasks.models.width import Corners, Width


class PooledParams(Settings):
    """Settings of every method with a pool.

    ``pool_similarity_mean`` and ``pool_spread`` are measured every `diagnostics_every` rounds (0: where a
    selection computes them).
    """

    diagnostics_every: int = Field(1, ge=0)

    def at(self, name: str, number: int) -> Any:
        """Return the setting `name`, which may be a schedule (:mod:`strategies.parts.schedule`), in round `number`."""
        value = getattr(self, name)
        return value if isinstance(value, float | str) else value.at(number)

    def due(self, number: int) -> bool:
        """Return whether the pool is measured in round `number`."""
        return self.diagnostics_every > 0 and number % self.diagnostics_every == 0

    def measured(self, pool: Pool, number: int) -> dict[str, float]:
        """Return how similar the models are in their parameters, if that is due in round `number`."""
        return diagnostics(pool.gram(columns=pool.layout.columns("parameters"))) if self.due(number) else {}


@dataclass
class PoolState:
    """The pool; its slots from the least to the most recently trained one; how many found no device this round."""

    pool: Pool
    queue: list[int]
    waiting: int = 0


Q = TypeVar("Q", bound=PooledParams, default=PooledParams)
S = TypeVar("S", bound=PoolState, default=PoolState)


class Pooled(Stateful[Q, S]):
    """Base of methods with one model per slot, which define :meth:`recombine`.

    All slots start as copies of one initial model. The global model is their uniform mean. If fewer than K clients are
    connected, the least recently trained slots are sent. A lost slot keeps its model. With ``params.widths`` a slot
    without a device that can hold it waits and comes first in the next round.
    """

    may_change = frozenset({"method.diagnostics_every"})

    def objective(self) -> Objective:
        """Return what clients minimise; with ``nested``, of the narrower widths too."""
        params: Any = self.params
        return Nested(params) if isinstance(params, Widths) and params.nested else super().objective()

    def init(self, start: Start) -> S:
        """Return a pool of copies of the initial model."""
        pool = self.pool_of(start, start.clients_per_round)
        return cast("S", self.State(pool, list(range(len(pool)))))

    def pool_of(self, start: Start, k: int) -> Pool:
        """Return a pool of k copies of the initial model, each of its slot's width."""
        return copies(start, k, self.slot_widths(k))

    def slot_widths(self, k: int) -> list[Width]:
        """Return the width of each of k slots, the widest first; empty if all are full."""
        params: Any = self.params
        return params.slots(k) if isinstance(params, Widths) else []

    def widths(self, corners: Corners | None = None) -> list[Width]:
        """Return the widths of the pool's models, the widest first; empty if all are full."""
        return self.slot_widths(len(getattr(self.params, "widths", ())))

    def sample(self, state: S, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw clients; with widths, replace idle ones so that as many slots as possible find a device."""
        drawn = round.clients
        if state.pool.corners is None:
            return drawn
        wanted = min(len(drawn), len(state.queue))
        if len(dealt := _assigned(state, round, drawn)) == wanted:
            return drawn
        free = sorted(set(available) - set(drawn))
        spare = [free[i] for i in stream(round.seed, "sample", round.number, 1).permutation(len(free))]
        while len(dealt) < wanted:
            idle = max(i for i, client in enumerate(drawn) if client not in dealt.values())
            changed = ((*drawn[:idle], client, *drawn[idle + 1 :]) for client in spare)
            better = next((one for one in changed if len(_assigned(state, round, one)) > len(dealt)), None)
            if better is None:
                break
            spare.remove(better[idle])
            drawn, dealt = better, _assigned(state, round, better)
        return drawn

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send the least recently trained slots, in the order of the slots, to the clients in the order of the draw."""
        pool, dealt = state.pool, _assigned(state, round, round.clients)
        state.waiting = min(len(round.clients), len(state.queue)) - len(dealt)
        if state.waiting:
            log(WARNING, "fedcross: round %s: %s slots wait for a fitting device", round.number, state.waiting)
        sent = [slot for slot in state.queue if slot in dealt]
        return [Task(dealt[slot], slot, pool.model(slot), width=pool.widths[slot]) for slot in sent]

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write the uploads into their slots, recombine, and measure the new pool where that is due."""
        metrics = {"waiting_slots": float(state.waiting)} if state.waiting else {}
        for upload in uploads:
            state.pool.write(upload.slot, upload.arrays)
        members = [upload.slot for upload in uploads]
        state.queue.sort(key=lambda slot: slot in members)  # stable: the longest waiting slots stay in front
        found = self.recombine(state, round, members) if members else None
        return metrics | (self.params.measured(state.pool, round.number) if found is None else found)

    @abstractmethod
    def recombine(self, state: S, round: Round, members: list[int]) -> dict[str, float] | None:
        """Make the models of the next round; `members`, one slot or more, hold this round's uploads.

        Return metrics with those of the new pool, or None if the base shall measure it.
        """

    def global_model(self, state: S) -> Arrays:
        """Return the uniform mean of the slots."""
        return state.pool.mean()

    def evaluation(self, state: S) -> Evaluation:
        """Return the global model; with widths that of every width, each value the mean of the slots that have it."""
        if state.pool.corners is None:
            return Evaluation([self.global_model(state)])
        means = {width: state.pool.mean(rank=rank) for rank, width in reversed([*enumerate(state.pool.levels)])}
        return Evaluation([], means)


def copies(start: Start, k: int, widths: Sequence[Width] = ()) -> Pool:
    """Return a pool of k copies of the initial model, each of its slot's width."""
    if widths and start.corners is None:
        raise ConfigError("method.widths needs the network; use the command fedcross.")
    pool = Pool(Layout.of(start.arrays, start.parameters), k, widths, start.corners if widths else None)
    pool.fill(start.arrays)
    return pool


def _assigned(state: PoolState, round: Round, clients: Sequence[int]) -> dict[int, int]:
    """Return slot -> client for these clients, by slot; only a device that can hold a slot gets it."""
    if state.pool.corners is None:
        return dict(zip(sorted(state.queue[: len(clients)]), clients))
    return assign(state.queue, state.pool.widths, {one: round.budget(one) for one in clients})


@dataclass
class AsyncPoolState:
    """What each slot sent last or sends next, the last upload of each, and how many each has had."""

    pool: Pool
    uploads: Pool
    versions: list[int]


B = TypeVar("B", bound=AsyncPoolState, default=AsyncPoolState)


class AsyncPool(Stateful[Q, B]):
    """Base of asynchronous methods with one model per slot, K = ``clients_per_round`` slots.

    A method defines :meth:`mixing`. All slots start as copies of one initial model; the global model is their mean.
    """

    asynchronous = True
    may_change = Pooled.may_change

    def init(self, start: Start) -> B:
        """Fill both pools with copies of the initial model."""
        k = start.clients_per_round
        sent, uploads = (copies(start, k) for _ in range(2))
        return cast("B", self.State(sent, uploads, [0] * k))

    @abstractmethod
    def mixing(self, state: B, round: Round, slots: list[int]) -> Matrix:
        """Return how the models that `slots` send next are mixed from the uploads (K, K)."""

    def dispatch(self, state: B, round: Round) -> list[Task]:
        """Send each free slot's row of the pool."""
        return [Task(client, slot, state.pool.model(slot)) for slot, client in zip(round.slots, round.clients)]

    def aggregate(self, state: B, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write all uploads of the group, then mix all of their slots at once; measure the pool at a round's end."""
        for upload in uploads:
            state.uploads.write(upload.slot, upload.arrays)
            state.versions[upload.slot] += 1
        if slots := [upload.slot for upload in uploads]:
            rows, integers = mixed(state.uploads, self.mixing(state, round, slots), slots)
            state.pool.rows[slots], state.pool.integers[slots] = rows, integers
        if not round.last:
            return {}
        spread = {"version_spread": float(max(state.versions) - min(state.versions))}
        return spread | self.params.measured(state.pool, round.number)

    def global_model(self, state: B) -> Arrays:
        """Return the uniform mean of the pool."""
        return state.pool.mean()


def mixed(pool: Pool, mixing: Matrix, slots: Sequence[int]) -> tuple[Array, Integers]:
    """Return float rows (n, d) and integer rows (n, i) of ``M @ pool`` for n `slots`; `pool` stays as it is."""
    needed = np.union1d(slots, np.flatnonzero(mixing[slots].any(axis=0)))
    part, own = Pool(pool.layout, len(needed)), np.searchsorted(needed, slots)
    part.rows[...], part.integers[...] = pool.rows[needed], pool.integers[needed]
    matrix = np.eye(len(needed))
    matrix[own] = mixing[slots][:, needed]
    part.mix(matrix)
    return part.rows[own], part.integers[own]
