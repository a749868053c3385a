"""What a run's configuration means for its server: how it meets its clients, and what it writes down of them."""

from __future__ import annotations

from collections.abc import Iterator
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.conf.schema import RunConfig
from fedcross.core.randomness import key
from fedcross.engines.job import engine_of
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.identity import unlike_replayed
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.exchange import LocalClients
from fedcross.strategies.round.federation import Federation
from fedcross.tasks.base import Task
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.weights import arrays_of


def examples_of(data: FederatedData, most: int | None = None) -> list[int]:
    """Return how many examples each client trains on in an epoch; one entry of 1 where each device has its own data.

    `most` is ``train.examples``: a client that has more draws as many in each visit.
    """
    return [1] if data.partition.own else [min(len(part), most or len(part)) for part in data.partition.train]


def independent(config: RunConfig, task: Task, count: int) -> Iterator[Arrays]:
    """Yield `count` random initial models, model i from the stream keyed by (seed, i); none is the usual one."""
    for i in range(count):
        network, _ = config.network(task, key(config.seed, "independent start", i))
        yield arrays_of(network)


def logs_replies(config: RunConfig, grid: Grid) -> bool:
    """Return whether accepted replies are logged.

    ``auto`` logs replies that come from other machines. It logs none if the clients run on this machine: there a crash
    costs at most one round of computing, and writing the log would slow down short rounds.
    """
    if config.checkpoint.log != "auto":
        return config.checkpoint.log
    return networked(config, grid)


def audited(config: RunConfig, grid: Grid) -> bool:
    """Return whether a new run writes the audit trail; ``auto`` where others than this machine may have trained."""
    return networked(config, grid) if config.log.audit == "auto" else config.log.audit


def networked(config: RunConfig, grid: Grid) -> bool:
    """Return whether the server reaches its clients over a network; False if they run on this machine."""
    return not (isinstance(grid, LocalClients) or engine_of(config.module("engine")).CAPABILITIES.simulates)


def tell_replayed(config: RunConfig) -> None:
    """Say in which settings a replay is not the recorded run, if the record lies in that run's folder."""
    if config.clock.events is None:
        return
    found = Checkpoints(Path(config.clock.events).parent).identity()
    if found is not None and (unlike := unlike_replayed(found, config)):
        log(
            WARNING,
            "fedcross: clock.events: the visits are those of the recorded run, but not the settings, so the model is "
            "another: %s.",
            "; ".join(unlike),
        )


def federation_of(config: RunConfig, run: str, network: bool = False) -> Federation:
    """Return the federation settings of `config`; `network` says whether clients are on other machines."""
    return Federation(
        **dict(config.federation),
        seed=config.seed,
        rounds=config.rounds,
        clients_per_round=config.clients_per_round,
        run=run,
        nonce=True,
        networked=network,
        defence=config.defence,
        compression=config.compression,
    )
