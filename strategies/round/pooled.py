"""Base of methods with one model per slot: slot i goes to the i-th drawn client, the server recombines the uploads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.pool.layout import Arrays, Layout
from fedcross.strategies.pool.pool import Pool, Storage, diagnostics
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Payload, Round, Upload


class PooledParams(Settings):
    """Settings of every method with a pool.

    Parameters
    ----------
    diagnostics_every : int
        Rounds between measurements of ``pool_similarity_mean`` and ``pool_spread``, of the pool that the next round
        sends; 0 for never. Each takes one pass over the pool. In a pool of several widths they are of the narrowest
        corner, which all models have, and say nothing of what only wider ones have.
    storage : Storage
        Where the pool lies.
    """

    diagnostics_every: int = Field(1, ge=0)
    storage: Storage = Storage()


Q = TypeVar("Q", bound=PooledParams, default=PooledParams)


class Pooled(Method[Q]):
    """Base of methods with one model per slot, K = ``clients_per_round`` slots.

    All slots start as copies of one initial model. A method defines :meth:`recombine`, which gets the slots whose
    upload was accepted. The global model is the uniform mean of all slots. If fewer than K clients are connected, the
    least recently trained slots are sent, as FedCross does. A slot whose reply the defence quarantines becomes the mean
    of the others' uploads, as there.
    """

    interchangeable = True
    may_change = frozenset({"method.diagnostics_every", "method.storage"})

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model."""
        self.pool = self.make_pool(Layout.of(arrays, self.parameter_names))
        self.pool.fill(arrays)
        #: Slots from the least to the most recently trained one.
        self.queue = list(range(len(self.pool)))

    def make_pool(self, layout: Layout) -> Pool:
        """Return a pool of K models of this layout."""
        return Pool(layout, self.federation.clients_per_round, self.params.storage)

    @abstractmethod
    def recombine(self, current: Round, members: list[int]) -> None:
        """Make the models of the next round; `members`, one slot or more, hold this round's uploads."""

    def dispatch(self, current: Round) -> list[Payload]:
        """Send slot i of the pool to the i-th client of the round."""
        slots = sorted(self.queue[: len(current.clients)])
        return [Payload(client, slot, self.pool.model(slot)) for slot, client in zip(slots, current.clients)]

    def stalest(self, slots: Sequence[int]) -> Sequence[int]:
        """Return `slots`, the least recently trained first."""
        return sorted(slots, key=self.queue.index)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write the uploads into their slots, recombine, and measure the new pool where that is due."""
        if not uploads:
            return {}
        for upload in uploads:
            self.pool.write(upload.slot, upload.arrays)
        members = [upload.slot for upload in uploads]
        if self.doubted:
            self.pool.replace(self.doubted, members)
        trained = set(members)
        self.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        self.recombine(current, members)
        every = self.params.diagnostics_every
        if not every or current.number % every:
            return {}
        return diagnostics(self.pool.gram(columns=self.pool.layout.columns("parameters")))

    def global_model(self) -> Arrays:
        """Return the uniform mean of the slots."""
        return self.pool.mean()

    def state(self) -> State:
        """Return the pool and the queue of slots, the least recently trained first."""
        return State({f"pool.{name}": array for name, array in self.pool.state().items()}, {"queue": self.queue})

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        self.pool.restore({name: state.arrays[f"pool.{name}"] for name in ("rows", "integers")})
        self.queue = [int(slot) for slot in state.values["queue"]]
