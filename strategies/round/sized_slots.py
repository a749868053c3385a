"""Slots of several widths: which of them go out in a round, to whom, and the global model of every width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import WARNING

from flwr.common.logger import log
from typing_extensions import TypeVar

from fedcross.core.randomness import stream
from fedcross.strategies.parts.nested import Nested
from fedcross.strategies.parts.objective import Objective
from fedcross.strategies.parts.widths import Widths, deal_slots, described, holds, trainable_slots
from fedcross.strategies.pool.layout import Layout
from fedcross.strategies.pool.pool import Pool, Storage
from fedcross.strategies.pool.sliced import SlicedPool
from fedcross.strategies.round.base import Method
from fedcross.strategies.wire.protocol import Payload, Round
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.models.slicing.plan import FULL, Size

W = TypeVar("W", bound=Widths, default=Widths)


class SizedSlots(Method[W]):
    """Base of methods whose slots have widths of their own (``method.widths``); without widths it changes nothing.

    A slot goes only to a device that can hold its model. The clients of a round are drawn as always; where they cannot
    hold all slots of the round, idle ones among them are replaced by others that can. A slot that no connected device
    can hold waits, and comes first in the next round.
    """

    each_needs_a_device = True
    pool: Pool
    queue: list[int]

    @classmethod
    def client_half(cls, params: W) -> Objective:
        """Return the method's objective, or that of nested training."""
        return Nested(params) if params.nested else super().client_half(params)

    def pool_of_widths(self, layout: Layout, k: int, storage: Storage) -> Pool:
        """Return a pool of k models: slices of the network if `widths` are set, else full ones."""
        if not self.params.widths:
            return Pool(layout, k, storage)
        return SlicedPool(layout, self.params.slots(k), self.sliced, storage)

    def all_sizes(self) -> Sequence[Size]:
        """Return the sizes of the pool's models, the largest first; empty without widths."""
        return [self.params.size(width) for width in sorted(self.params.widths, reverse=True)]

    def budget_remarks(self) -> list[str]:
        """Return remarks on devices that can hold no model, and on slots that wait for one in every round."""
        found = super().budget_remarks()
        drawn = self.federation.clients_per_round
        if not self.budgets or self.federation.networked or self.models > drawn:  # with more models some wait anyhow
            return found
        slots, sizes = self.params.slots(drawn), self.all_sizes()
        for size in sizes:
            wanted = sum(slot.width >= size.width for slot in slots)
            if (devices := sum(holds(budget, size) for budget in self.budgets.values())) < wanted:
                above = "" if size == sizes[0] else " or above"
                found.append(
                    f"method.widths: slots of width {size.width:g}{above}: {wanted}, devices that can hold one: "
                    f"{devices}. So slots wait in every round. Lower clients_per_round or their share (method.shares)."
                )
        return found

    @property
    def models(self) -> int:
        """How many models the pool has at the start."""
        return self.federation.clients_per_round

    @property
    def global_size(self) -> Size:
        """The size of the global model: the widest of the pool's."""
        return self.all_sizes()[0] if self.params.widths else FULL

    @property
    def _sizes(self) -> Sequence[Size]:
        return self.pool.sizes if isinstance(self.pool, SlicedPool) else [FULL] * len(self.pool)

    def corner_of(self, slot: int, arrays: Arrays) -> Arrays:
        """Return the part of a full model that `slot` has."""
        return self.sliced.corner(arrays, self._sizes[slot]) if self.params.widths else arrays

    def suited(self, number: int, clients: tuple[int, ...], available: Sequence[int]) -> tuple[int, ...]:
        """Return `clients`, the idle ones replaced so that as many slots as possible find a device."""
        drawn = clients
        free = sorted(set(available) - set(drawn))
        order = stream(self.federation.seed, "sample", number, 1).permutation(len(free))
        spare = [free[i] for i in order]
        wanted = min(len(drawn), len(self.queue))
        while True:
            dealt = self._deal(drawn)
            if len(dealt) >= wanted or (better := self._exchanged(drawn, dealt, spare)) is None:
                return drawn
            drawn = better

    def _exchanged(self, drawn: tuple[int, ...], dealt: Mapping[int, int], spare: list[int]) -> tuple[int, ...] | None:
        """Return `drawn` with an idle client replaced so that one more slot finds a device; None if nobody can."""
        idle = next(place for place in reversed(range(len(drawn))) if drawn[place] not in dealt.values())
        for client in spare:
            changed = (*drawn[:idle], client, *drawn[idle + 1 :])
            if len(self._deal(changed)) > len(dealt):
                spare.remove(client)
                return changed
        return None

    def _deal(self, clients: Sequence[int]) -> dict[int, int]:
        """Return slot -> client for these clients, in the order of the slots."""
        budgets = {client: self.budget(client) for client in clients}
        slots = trainable_slots(self.queue, self._sizes, list(budgets.values()))
        return deal_slots(slots, self._sizes, clients, budgets)

    def dispatch_sized(self, current: Round) -> list[Payload]:
        """Send each slot that finds a device to it; of equal claims, the least recently trained slots go first."""
        dealt = self._deal(current.clients)
        waiting = min(len(current.clients), len(self.pool)) - len(dealt)
        if waiting:
            self._report.metrics["waiting_slots"] = float(waiting)
            log(
                WARNING,
                "fedcross: round %s: slots that wait, since no device that is free can hold them: %s",
                current.number,
                waiting,
            )
        sizes = self._sizes
        return [
            Payload(client, slot, self.pool.model(slot), config=described(sizes[slot]))
            for slot, client in dealt.items()
        ]

    def slice_models(self) -> dict[Size, Arrays]:
        """Return the global model of every width: each value is the mean of the slots that have it."""
        if not isinstance(self.pool, SlicedPool):
            return {}
        return {size: self.pool.mean_of(size) for size in reversed(self.pool.levels)}
