"""Slices of the model on the server: the plan of a run's network, and whether every size of the run works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcross.conf.cross_checks import SIMULATING
from fedcross.core.errors import ConfigError
from fedcross.strategies.round.clock import budgets_of
from fedcross.strategies.round.federation import Federation

if TYPE_CHECKING:
    from torch import nn

    from fedcross.conf.schema import RunConfig
    from fedcross.strategies.round.base import Method
    from fedcross.tasks.base import Task
    from fedcross.tasks.models.slicing.plan import Plan, Size


def plan_for(config: RunConfig, network: nn.Module, task: Task) -> Plan | None:
    """Return how the run's network is sliced; None if its method sends full models only.

    Raises
    ------
    ConfigError
        If the network cannot be sliced, or ``train.only`` leaves only a part of it.
    """
    from fedcross.strategies.round.registry import method_class
    from fedcross.tasks.models.slicing import plan_of
    from fedcross.tasks.models.slicing.plan import Plan

    if not method_class(config.modules["method"]).slices(config.method):
        return None
    if all(width >= 1 for width in getattr(config.method, "widths", ())):
        return Plan((), {}, {})  # only full models, but they go to devices that can hold them alone
    if config.train.only:
        raise ConfigError(
            "train.only: a part of a model cannot be sliced by width. Choose a method whose models have one "
            "size, as fedavg, fedcross or fedfan."
        )
    return plan_of(network, task)


def prepare_slices(method: Method, config: RunConfig, plan: Plan | None, clients: int) -> None:
    """Give `method`, before it begins, the plan and the widths of the clients' devices."""
    method.plan = plan
    method.budgets = budgets_of(config.devices, config.seed, clients) if plan is not None else {}


def check_run(config: RunConfig, network: nn.Module, task: Task, clients: int) -> list[str]:
    """Return remarks on devices that will never train, and models that will wait.

    Raises
    ------
    ConfigError
        Unless every size of the run makes a network of its own that works, and has a device that can hold it.
    """
    from fedcross.strategies.round.registry import method_class
    from fedcross.tasks.models.slicing import cut

    if (plan := plan_for(config, network, task)) is None:
        return []
    networked = config.names["engine"] not in SIMULATING
    rules = Federation(clients_per_round=config.clients_per_round, nonce=True, networked=networked)
    method = method_class(config.modules["method"])(config.method, rules)
    prepare_slices(method, config, plan, clients)
    method.check_budgets()
    sizes = method.all_sizes()
    for size in sizes:
        _check_cut(plan, size, "method.whole" if hasattr(config.method, "whole") else "method.starts")
        cut(network, plan, size, task)
    _check_different(plan, sizes)
    return method.budget_remarks()


def _check_cut(plan: Plan, size: Size, whole: str) -> None:
    """Raise a ConfigError if a narrow model would be the full one; `whole` is the setting that keeps groups whole."""
    if size.width >= 1 or any(plan.kept(group, size) < found.channels for group, found in enumerate(plan.groups)):
        return
    groups = f"this network has {len(plan.groups)} group{'s' * (len(plan.groups) != 1)} of channels"
    if size.start:
        raise ConfigError(
            f"{whole}={size.start}: {groups}, so a model of width {size.width:g} would be the full one. Keep fewer "
            "groups whole; 0 cuts all."
        )
    raise ConfigError(
        f"method.widths={size.width:g}: {groups}, and none is cut, so it is the full model. Leave that width out."
    )


def _check_different(plan: Plan, sizes: Sequence[Size]) -> None:
    """Raise a ConfigError if models of two widths are the same network."""
    known: dict[tuple[int, ...], Size] = {}
    for size in sizes if plan.groups else ():
        kept = tuple(plan.kept(group, size) for group in range(len(plan.groups)))
        if (other := known.setdefault(kept, size)).width != size.width:
            raise ConfigError(
                f"method.widths: {other.width:g} and {size.width:g} cut this network alike. Leave one of them out."
            )
