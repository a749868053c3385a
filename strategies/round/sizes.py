"""Slices of the model in a round: what size each slot has, which device can hold it, and what its reply must be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from logging import WARNING

from flwr.common.logger import log

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import P
from fedcross.strategies.parts.widths import asked, holds
from fedcross.strategies.round.flower_hooks import FlowerHooks
from fedcross.strategies.round.nodes import Nodes
from fedcross.strategies.wire.protocol import Payload
from fedcross.strategies.wire.records import Arrays, Spec
from fedcross.tasks.models.slicing.plan import FULL, Plan, Size


class Sizes(FlowerHooks[P]):
    """What a method with models of several sizes has in common; for all others every model is the full one.

    Attributes
    ----------
    nodes : Nodes
        The connected nodes; some tell the width of their device.
    plan : Plan or None
        How the network is sliced; set before :meth:`begin` if :meth:`slices` says that the method needs it.
    budgets : mapping of int to float
        Client -> width of its device, as ``devices.widths`` deals them.
    told : mapping of int to float, or None
        Client -> width that its node had told when this round was drawn, while a round is dealt again after a crash;
        None if what nodes tell now counts, as always else.
    """

    nodes: Nodes
    plan: Plan | None = None
    budgets: Mapping[int, float] = {}
    told: Mapping[int, float] | None = None

    @classmethod
    def slices(cls, params: Settings) -> bool:
        """Return whether the method sends slices of the model with these settings."""
        return bool(getattr(params, "widths", ()))

    @property
    def sliced(self) -> Plan:
        """The plan.

        Raises
        ------
        ConfigError
            If nobody has set one: an app of one's own starts with arrays, which say nothing of a network.
        """
        if self.plan is None:
            raise ConfigError(
                f"{type(self).__name__}: method.widths needs the network. Set method.plan = plan_of(network, task) of "
                "fedcross.tasks.models.slicing before the run, or start it with the command fedcross."
            )
        return self.plan

    def budget(self, client: int) -> float:
        """Return the width of a client's device: what its node says, else ``devices.widths``, else 1."""
        told = self.nodes.width(client) if self.told is None else self.told.get(client)
        return self.budgets.get(client, 1.0) if told is None else told

    def fits(self, payload: Payload, client: int) -> bool:
        """Return whether a client's device can hold the model in `payload`."""
        return not self.slices(self.params) or holds(self.budget(client), asked(payload.config))

    def outgrown(self, payload: Payload) -> bool:
        """Return whether the payload's client cannot hold its model, and log it."""
        if self.fits(payload, payload.client):
            return False
        held, width = self.budget(payload.client), asked(payload.config).width
        what = f"the model has width {width:g}, its device holds {held:g} now"
        log(WARNING, "fedcross: client %s is not asked for slot %s: %s", payload.client, payload.slot, what)
        return True

    def suited(self, number: int, clients: tuple[int, ...], available: Sequence[int]) -> tuple[int, ...]:
        """Return the drawn `clients` of round `number`, or others where those cannot hold the round's models."""
        return clients

    def spec_of(self, payload: Payload) -> Spec:
        """Return the names, shapes and dtypes of the model in `payload`."""
        return self.spec_at(asked(payload.config))

    def spec_at(self, size: Size) -> Spec:
        """Return the names, shapes and dtypes of a model of `size`."""
        if size.width >= 1:
            return self.spec
        plan = self.sliced
        return {
            name: (plan.shape(name, size) if name in plan.entries else shape, dtype)
            for name, (shape, dtype) in self.spec.items()
        }

    def cut(self, arrays: Arrays, payload: Payload) -> Arrays:
        """Return the part of a full model's `arrays` that the model in `payload` has, for compression."""
        size = asked(payload.config)
        return arrays if size.width >= 1 else self.sliced.corner(arrays, size)

    @property
    def global_size(self) -> Size:
        """The size of the global model: the full one, or the widest that the method trains."""
        widths = getattr(self.params, "widths", ())
        return Size(max(widths)) if widths else FULL

    def slice_models(self) -> dict[Size, Arrays]:
        """Return the global model of every size that the method trains, the widest first; empty without slices."""
        return {}

    def client_models(self) -> dict[Size, Arrays]:
        """Return the same as weights of the networks that clients train, which may compute more than a slice does."""
        return self.slice_models()

    def all_sizes(self) -> Sequence[Size]:
        """Return every size that the method trains, the largest first; empty without slices."""
        return [Size(width) for width in sorted(getattr(self.params, "widths", ()), reverse=True)]

    def replies_by_size(self, payloads: Sequence[Payload], accepted: Collection[int]) -> dict[str, int]:
        """Return, for each size in `payloads`, how many of its slots are `accepted`; empty if there is one size only.

        Keys are :attr:`Size.text`, the largest size first; a size that did not go out has none.
        """
        sizes = self.all_sizes()
        if len(sizes) < 2:
            return {}
        slots = [(asked(payload.config), payload.slot) for payload in payloads]
        out = [size for size in sizes if any(size == one for one, _ in slots)]
        return {size.text: sum(one == size and slot in accepted for one, slot in slots) for size in out}

    def check_budgets(self) -> None:
        """Raise a ConfigError if the widths of all devices are known and fit no model, or do not fit some slot's.

        On a network nodes tell their own, and more may come: there a slot waits.
        """
        sizes = self.all_sizes()
        if not self.budgets or not sizes or self.federation.networked:
            return
        needed, widest = sizes[0 if self.each_needs_a_device else -1], max(self.budgets.values())
        if not holds(widest, needed):
            raise ConfigError(
                f"method.widths={needed.width:g}: no device can hold it, the widest is {widest:g} (devices.widths). "
                + ("Leave that width out" if self.each_needs_a_device else "Add a narrower one")
                + " or raise a device's."
            )

    def budget_remarks(self) -> list[str]:
        """Return remarks on devices that can hold no model, if the widths of all are known."""
        sizes = self.all_sizes()
        if not self.budgets or not sizes or self.federation.networked:
            return []
        lost = [budget for budget in self.budgets.values() if not holds(budget, sizes[-1])]
        if not lost:
            return []
        widths = sorted({size.width for size in sizes}, reverse=True)
        fewer = "" if self.each_needs_a_device else " A round has so many clients less as it draws of them."
        return [
            f"method.widths={widths}: {len(lost)} of {len(self.budgets)} devices can hold none and never train.{fewer}"
        ]

    #: Whether every size must have a device; else a client simply gets what it can hold.
    each_needs_a_device = False
