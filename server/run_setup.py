"""Builds the driver of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from flwr.serverapp import Grid
from torch import nn

from fedcross.conf.schema import RunConfig
from fedcross.core.randomness import key
from fedcross.engines.job import engine_of
from fedcross.server.widths import corners_for
from fedcross.strategies.method import Start
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.clock import budgets_of, clock_of
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.ledger import Tell
from fedcross.strategies.round.polling import LocalClients
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.sender import ReplyLog
from fedcross.strategies.round.settings import RoundSettings
from fedcross.tasks.base import Task
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.weights import arrays_of, trainable


@dataclass(frozen=True)
class Model:
    """The run's network as clients train it, the one that is evaluated, and the digest of its untrained part."""

    network: nn.Module
    evaluated: nn.Module
    base: str

    @classmethod
    def of(cls, config: RunConfig, task: Task) -> Model:
        """Build the networks of `config`."""
        network, base = config.network(task)
        return cls(network, config.new_method().network(network, deployed=True), base)


def build(
    config: RunConfig,
    run: str,
    grid: Grid,
    data: FederatedData,
    model: Model,
    *,
    log: ReplyLog | None,
    tell: Tell,
    watches: Collection[str],
    local_due: Callable[[int], bool],
) -> Driver:
    """Return the driver of the run, before its first round."""
    method = config.new_method()
    own, corners = data.partition.own, corners_for(config, data.task)
    examples = [1] if own else [min(len(p), config.train.examples or len(p)) for p in data.partition.train]

    def independent(i: int) -> Arrays:
        return arrays_of(config.network(data.task, key(config.seed, "independent start", i))[0])

    arrays = arrays_of(model.network)
    start = Start(
        arrays, _trained(arrays, trainable(model.network)), config.clients_per_round, config.rounds, config.seed,
        corners, independent,
    )  # fmt: skip
    return open_run(
        method,
        start,
        RoundSettings.of(config, run, networked=networked(config, grid)),
        clock=clock_of(config.clock, config.devices, config.seed, examples, config.train.epochs, method.asynchronous),
        budgets=budgets_of(config.devices, config.seed, 0 if own else len(data.partition)) if corners else {},
        log=log,
        tell=tell,
        watches=watches,
        base=model.base,
        local_due=local_due,
        keep=config.checkpoint.keep,
    )


def _trained(arrays: Arrays, names: Collection[str]) -> tuple[str, ...]:
    """Return those of `names` that are float entries, in the order of `arrays`."""
    return tuple(name for name, array in arrays.items() if array.dtype.kind == "f" and name in names)


def networked(config: RunConfig, grid: Grid) -> bool:
    """Return whether the server reaches its clients over a network; False if they run on this machine."""
    return not (isinstance(grid, LocalClients) or engine_of(config.module("engine")).CAPABILITIES.simulates)
