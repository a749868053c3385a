"""Base of asynchronous methods with one model per slot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from fedcross.strategies.method import Method, Round, Start, Task, Upload
from fedcross.strategies.parts.pooled import PooledParams
from fedcross.strategies.pool.mixing import Mixing
from fedcross.strategies.pool.pool import Arrays, Layout, Pool, diagnostics


@dataclass
class AsyncPoolState:
    """What each slot sent last or sends next, the last upload of each, and how many each has had."""

    pool: Pool
    uploads: Pool
    versions: list[int]


Q = TypeVar("Q", bound=PooledParams, default=Any)
S = TypeVar("S", bound=AsyncPoolState, default=Any)


class AsyncPool(Method[Q, S]):
    """Base of asynchronous methods with one model per slot, K = ``clients_per_round`` slots.

    A method defines :meth:`mixing`: what the slots whose uploads have just arrived send next, as a mixture of uploads.
    All slots start as copies of one initial model; the global model is the uniform mean of the pool.
    """

    asynchronous = True
    may_change = frozenset({"method.diagnostics_every", "method.storage"})

    def init(self, start: Start) -> S:
        """Fill both pools with copies of the initial model."""
        layout, k = Layout.of(start.arrays, start.parameters), start.clients_per_round
        pools = [Pool(layout, k, self.params.storage) for _ in range(2)]
        for pool in pools:
            pool.fill(start.arrays)
        return cast("S", AsyncPoolState(pools[0], pools[1], [0] * k))

    @abstractmethod
    def mixing(self, state: S, round: Round, slots: list[int]) -> Mixing:
        """Return how the models that `slots` send next are mixed from the uploads."""

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send each free slot's row of the pool."""
        return [Task(client, slot, state.pool.model(slot)) for slot, client in zip(round.slots, round.clients)]

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write all uploads of the group, then mix all of their slots at once; measure the pool at a round's end."""
        for upload in uploads:
            state.uploads.write(upload.slot, upload.arrays)
            state.versions[upload.slot] += 1
        if slots := [upload.slot for upload in uploads]:
            rows, integers = mixed(state.uploads, self.mixing(state, round, slots), slots)
            state.pool.rows[slots], state.pool.integers[slots] = rows, integers
        if not round.last:
            return {}
        found = {"version_spread": float(max(state.versions) - min(state.versions))}
        every = self.params.diagnostics_every
        if not every or round.number % every:
            return found
        return found | diagnostics(state.pool.gram(columns=state.pool.layout.columns("parameters")))

    def global_model(self, state: S) -> Arrays:
        """Return the uniform mean of the pool."""
        return state.pool.mean()


def mixed(pool: Pool, mixing: Mixing, slots: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return float rows (n, d) and integer rows (n, i) of ``M @ pool`` for n `slots`; `pool` stays as it is."""
    needed = sorted({*slots, *(source for slot in slots for source in mixing.rows[slot])})
    place = {slot: i for i, slot in enumerate(needed)}
    part = Pool(pool.layout, len(needed), pool.storage)
    part.rows[...], part.integers[...] = pool.rows[needed], pool.integers[needed]
    rows = ({place[j]: w for j, w in mixing.rows[i].items()} if i in slots else {place[i]: 1.0} for i in needed)
    part.mix(Mixing(tuple(rows)))
    own = [place[slot] for slot in slots]
    return part.rows[own], part.integers[own]
