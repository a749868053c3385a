"""Builds the driver of a run from its configuration, and checks the widths of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fedcross.conf.cross_checks import SIMULATING
from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key
from fedcross.engines.job import engine_of
from fedcross.strategies.method import Start
from fedcross.strategies.parts.pooled import Pooled
from fedcross.strategies.parts.widths import holds
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.clock import budgets_of, clock_of
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.nodes import LocalClients
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from fedcross.tasks.base import Task
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.weights import arrays_of, trainable
from fedcross.tasks.models.width import Corners, Width


def driver_of(
    config: RunConfig,
    run: str,
    data: FederatedData,
    network: nn.Module,
    *,
    networked: bool,
    **options: Any,
) -> Driver:
    """Return the driver of the run, before its first round; `options` are those of :func:`open_run`."""
    method, arrays, weights = config.new_method(), arrays_of(network), trainable(network)
    own, corners = data.partition.own, corners_for(config, data.task)
    examples = [1] if own else [min(len(p), config.train.examples or len(p)) for p in data.partition.train]
    trained = tuple(name for name, array in arrays.items() if array.dtype.kind == "f" and name in weights)

    def independent(i: int) -> Arrays:
        return arrays_of(config.network(data.task, key(config.seed, "independent start", i))[0])

    return open_run(
        method,
        Start(arrays, trained, config.clients_per_round, config.rounds, config.seed, corners, independent),
        RoundSettings.of(config, run, networked=networked),
        clock=clock_of(config.clock, config.devices, config.seed, examples, config.train.epochs, method.asynchronous),
        budgets=budgets_of(config.devices, config.seed, 0 if own else len(data.partition)) if corners else {},
        keep=config.checkpoint.keep,
        **options,
    )


def networked(config: RunConfig, grid: Grid) -> bool:
    """Return whether the server reaches its clients over a network; False if they run on this machine."""
    return not (isinstance(grid, LocalClients) or engine_of(config.module("engine")).CAPABILITIES.simulates)


def corners_for(config: RunConfig, task: Task) -> Corners | None:
    """Return the shapes of the run's models at every width; None if its method sends full models only."""
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

    A ConfigError says that a width makes no network of its own, or that no device can hold it.
    """
    if (corners := corners_for(config, task)) is None:
        return []
    method = config.new_method()
    widths = method.widths(corners)
    _check_different(corners, widths)
    budgets = budgets_of(config.devices, config.seed, clients)
    if not budgets or config.names["engine"] not in SIMULATING:  # on a network nodes tell their own, and more may come
        return []
    widest = max(budgets.values())
    slots = method.slot_widths(config.clients_per_round) if isinstance(method, Pooled) else []
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
