"""Widths on the server: the shapes of a run's models, and whether every width of the run works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcross.conf.cross_checks import SIMULATING
from fedcross.core.errors import ConfigError
from fedcross.strategies.parts.pooled import Slots
from fedcross.strategies.parts.widths import holds
from fedcross.strategies.round.clock import budgets_of

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.strategies.method import Method
    from fedcross.tasks.base import Task
    from fedcross.tasks.models.width import Corners, Width


def corners_for(config: RunConfig, task: Task) -> Corners | None:
    """Return the shapes of the run's models at every width; None if its method sends full models only.

    Raises
    ------
    ConfigError
        If the network has one width, or ``train.only`` leaves only a part of it.
    """
    if not config.new_method().widths():
        return None
    if config.train.only and any(width < 1 for width in getattr(config.method, "widths", ())):
        raise ConfigError(
            "train.only: a part of a model has one width. Choose a method whose models have one size, as fedavg, "
            "fedcross or fedfan without method.widths."
        )
    return config.corners(task)


def check_run(config: RunConfig, task: Task, clients: int) -> list[str]:
    """Return remarks on devices that will never train, and models that will wait.

    Raises
    ------
    ConfigError
        Unless every width of the run makes a network of its own, and has a device that can hold it.
    """
    if (corners := corners_for(config, task)) is None:
        return []
    method = config.new_method()
    widths = method.widths(corners)
    _check_different(corners, widths)
    budgets = budgets_of(config.devices, config.seed, clients)
    if not budgets or config.names["engine"] not in SIMULATING:  # on a network nodes tell their own, and more may come
        return []
    widest, slots = max(budgets.values()), _slots(method, config.clients_per_round)
    if not holds(widest, widths[0 if slots else -1]):
        raise ConfigError(
            f"method.widths={widths[0 if slots else -1].ratio:g}: no device can hold it, the widest is {widest:g} "
            "(devices.widths). Leave that width out, add a narrower one or raise a device's."
        )
    found = []
    if lost := sum(not holds(budget, widths[-1]) for budget in budgets.values()):
        found.append(f"method.widths: {lost} of {len(budgets)} devices can hold no model and never train.")
    if idle := [width.text for width in widths if not any(holds(budget, width) for budget in budgets.values())]:
        found.append(f"method.widths={idle}: no device can hold these, so a part of the model is never trained.")
    for width in widths if slots else ():
        wanted = sum(slot.ratio >= width.ratio for slot in slots)
        if (devices := sum(holds(budget, width) for budget in budgets.values())) < wanted:
            found.append(
                f"method.widths: {wanted} slots of width {width.ratio:g} or above, {devices} devices can hold one. "
                "So slots wait in every round. Lower clients_per_round or their share (method.shares)."
            )
    return found


def _slots(method: Method, k: int) -> list[Width]:
    """Return the width of each slot, for methods whose slots have one."""
    return method.slot_widths(k) if isinstance(method, Slots) else []


def _check_different(plan: Corners, widths: Sequence[Width]) -> None:
    """Raise a ConfigError if a narrow model is the full one, or models of two widths are the same network."""
    known: dict[tuple[tuple[int, ...], ...], Width] = {}
    for width in sorted(widths, reverse=True):
        shapes = tuple(plan.shapes(width).values())
        if width.ratio < 1 and not any(plan.cuts(name, width) for name in plan.shapes(width)):
            raise ConfigError(
                f"method.widths: a model of width {width.text} would be the full one; this network has "
                f"{len(plan.hidden)} hidden dimensions. Leave that width out, or keep fewer dimensions whole "
                "(method.whole, with AdaptiveFL method.starts)."
            )
        if (other := known.setdefault(shapes, width)).ratio != width.ratio:
            raise ConfigError(
                f"method.widths: {other.ratio:g} and {width.ratio:g} make the same network. Leave one of them out."
            )
