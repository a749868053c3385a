"""Base of asynchronous methods with one model per slot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from fedcross.strategies.asynchronous.visits import AsyncMethod
from fedcross.strategies.pool.layout import Arrays, Layout
from fedcross.strategies.pool.mixing import Mixing
from fedcross.strategies.pool.pool import Pool, diagnostics
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.pooled import PooledParams
from fedcross.strategies.wire.protocol import Payload, Round, Upload

Q = TypeVar("Q", bound=PooledParams, default=PooledParams)


class AsyncPool(AsyncMethod[Q]):
    """Base of asynchronous methods with one model per slot, K = ``clients_per_round`` slots.

    ``uploads`` holds the last upload of each slot, ``pool`` what each slot sent last or sends next, ``versions`` how
    many uploads each slot has had. A method defines :meth:`mixing`: what the slots whose uploads have just arrived send
    next, as a mixture of uploads. All slots start as copies of one initial model.

    Cost on the server: two pools of memory; for each upload one copy of the uploads that it is mixed from.
    """

    may_change = frozenset({"method.diagnostics_every", "method.storage"})

    def setup(self, arrays: Arrays) -> None:
        """Fill both pools with copies of the initial model."""
        layout = Layout.of(arrays, self.parameter_names)
        self.pool = Pool(layout, self.slots, self.params.storage)
        self.uploads = Pool(layout, self.slots, self.params.storage)
        self.pool.fill(arrays)
        self.uploads.fill(arrays)
        self.versions = [0] * self.slots

    @abstractmethod
    def mixing(self, current: Round, slots: list[int]) -> tuple[Mixing, dict[str, float]]:
        """Return how the models that `slots` send next are mixed from the uploads, and metrics."""

    def payload(self, slot: int, client: int) -> Payload:
        """Send the slot's row of the pool."""
        return Payload(client, slot, self.pool.model(slot))

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write all uploads of the group, then mix all of their slots at once."""
        if not uploads:
            return {}
        for upload in uploads:
            self.uploads.write(upload.slot, upload.arrays)
            self.versions[upload.slot] += 1
        slots = [upload.slot for upload in uploads]
        mixing, metrics = self.mixing(current, slots)
        rows, integers = mixed(self.uploads, mixing, slots)
        self.pool.rows[slots], self.pool.integers[slots] = rows, integers
        return metrics

    def measure(self, number: int) -> dict[str, float]:
        """Measure the pool where that is due, and how far apart its versions are."""
        found = {"version_spread": float(max(self.versions) - min(self.versions))}
        every = self.params.diagnostics_every
        if not every or number % every:
            return found
        return found | diagnostics(self.pool.gram(columns=self.pool.layout.columns("parameters")))

    def global_model(self) -> Arrays:
        """Return the uniform mean of the pool."""
        return self.pool.mean()

    def state(self) -> State:
        """Return both pools and the versions."""
        arrays = {f"pool.{name}": array for name, array in self.pool.state().items()}
        arrays |= {f"uploads.{name}": array for name, array in self.uploads.state().items()}
        return State(arrays, {"versions": list(self.versions)})

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        for name, pool in (("pool", self.pool), ("uploads", self.uploads)):
            pool.restore({part: state.arrays[f"{name}.{part}"] for part in ("rows", "integers")})
        self.versions = [int(version) for version in state.values["versions"]]


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
