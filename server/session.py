"""One run on the server: rounds, evaluation, record, checkpoints."""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from safetensors.numpy import save

from fedcross.client.workshop import pick_device
from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.randomness import key
from fedcross.engines.job import engine_of
from fedcross.server import accounting
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.evaluation import Evaluator, across_clients
from fedcross.server.loggers import open_logger
from fedcross.server.progress import Progress
from fedcross.server.reply_log import Replies
from fedcross.server.snapshots import Snapshots
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.federation import Federation
from fedcross.strategies.round.nodes import LocalClients
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.base import Task
from fedcross.tasks.models import create
from fedcross.tasks.models.weights import arrays_of, every_name, tied, trainable
from fedcross.tasks.scoring import Score

#: Settings that may differ between a run and its continuation: they do not change what is computed.
FREE = {
    "rounds",
    "output",
    "resume",
    "engine",
    "logger",
    "checkpoint",
    "snapshots",
    "device",
    "data_root",
    "federation",
}
#: Likewise, within groups: where the data set lies.
PLACES = {"task.root", "task.download"}


class Session:
    """A run of `config` over `grid`.

    Parameters
    ----------
    config : RunConfig
        The checked configuration; ``output`` names the run's folder.
    grid : Grid
        Where the clients are.
    progress : Progress
        Told about every round.
    """

    def __init__(self, config: RunConfig, grid: Grid, progress: Progress) -> None:
        self.config = config
        self.grid = grid
        self.progress = progress
        self.folder = make_folder(config)
        self.checkpoints = Checkpoints(self.folder, config.checkpoint.keep, config.checkpoint.milestone)
        self.snapshots = Snapshots(self.folder, config.snapshots.rounds)
        self.device = pick_device(config.device)
        kind = method_class(config.modules["method"])
        data = config.load_data()
        plain = create(config.modules["model"], config.model, data.task, config.seed)
        model = kind.network(plain, config.method, config.seed)
        self.evaluator = Evaluator(kind.evaluation_network(model, config.method), data, self.device)
        self._last_score: Score | None = None
        self.done, self.run = 0, secrets.token_hex(8)
        state = None
        if config.resume is not None:
            self.done, state, identity = self.checkpoints.latest()
            check_same(identity["config"], describe(config), kind.may_change)
            self.run = identity["run"]
        self.method: Method = kind(config.method, federation_of(config, self.run, networked(config, grid)))
        self.method.durable = {}
        self._accepted: deque[dict[int, int]] = deque(maxlen=config.checkpoint.keep)
        self.method.begin(arrays_of(model), trainable(model))
        self.method.tied = tied(self.evaluator.model)
        if state is None and self.method.independent_models:
            self.method.start_from(independent(config, data.task, self.method.independent_models))
        if state is not None:
            self.method.resume(state)
            if config.privacy.enabled:  # the round that was cut off may have released uploads that nobody counted
                self.method.requests.update(list(self.method.requests))
        self.method.observer = self.snapshots.uploads if self.snapshots.rounds else None
        self.replies = Replies(self.folder, self.run, self.done) if logs_replies(config, grid) else None
        self.method.log = self.replies

    def execute(self) -> dict[str, Any]:
        """Run the remaining rounds and return ``result.json``; whatever is done stays on disk if it is cut off."""
        config = self.config
        ledger = accounting.Ledger(self.folder, self.done)
        shown = flatten(describe(config))
        logger = open_logger(config.logger.model_dump(), self.folder, self.done + 1, self.run, shown)
        if self.replies is not None and config.resume is None:
            self._checkpoint(0)  # else what the first rounds accept could not be used after a crash
        self.progress.start(f"{config.names['method']} {config.names['task']}", self.done, config.rounds)
        try:
            for number in range(self.done + 1, config.rounds + 1):
                entry = self._round(number)
                ledger.add(entry)
                if number % config.checkpoint.every == 0 or number == config.rounds:
                    self._checkpoint(number)
                logger.add(entry)
                self.progress.round(entry)
        finally:
            self.progress.stop()
            ledger.close()
            logger.close()
            if self.replies is not None:
                self.replies.close()
        return self._finish(ledger)

    def _round(self, number: int) -> dict[str, Any]:
        started = time.perf_counter()
        report = self.method.run_round(number, self.grid)
        if number in self.snapshots.rounds:
            self.snapshots.model(number, self.method.global_model())
        score: Score | None = None
        if number % self.config.evaluate_every == 0 or number == self.config.rounds:
            score = self.evaluator.score_of(self.method.evaluation_models())
            self._last_score = score
        entry = accounting.line(report, score, time.perf_counter() - started)
        if score is not None and self.config.evaluate_clients:
            entry |= across_clients(self.method, self.grid, number)
        return entry

    def _checkpoint(self, number: int) -> None:
        """Make round `number` durable, and let clients forget what no kept checkpoint needs any more."""
        self.checkpoints.save(number, self.method.checkpoint(), self._identity())
        self._accepted.append(dict(self.method.accepted))
        if len(self._accepted) == self._accepted.maxlen:
            self.method.durable = self._accepted[0]
        if self.replies is not None:
            self.replies.restart(number)

    def _finish(self, ledger: accounting.Ledger) -> dict[str, Any]:
        names = self.config.names
        result = accounting.result(
            ledger.lines,
            {
                **{group: names[group] for group in ("method", "task", "model", "partition", "engine")},
                "seed": self.config.seed,
                "device": str(self.device),
                "machine": f"{platform.machine()} {platform.system()}",
                "defence": self.config.defence.model_dump() if self.config.defence.enabled else None,
                **self._privacy(),
            },
            self._last_score,
        )
        write_model(self.folder / "model.safetensors", self.method.evaluation_arrays(), self.method.tied)
        accounting.write_atomically(self.folder / "result.json", (json.dumps(result, indent=2) + "\n").encode())
        return result

    def _privacy(self) -> dict[str, Any]:
        """Return what ``result.json`` says about privacy; nothing where it is off."""
        if not self.config.privacy.enabled:
            return {}
        from fedcross.server.privacy import statement

        return {"privacy": statement(self.config.privacy, self.method.requests)}

    def _identity(self) -> dict[str, Any]:
        return {"run": self.run, "config": describe(self.config), "module": self.config.modules["method"]}


def independent(config: RunConfig, task: Task, count: int) -> Iterator[Arrays]:
    """Yield `count` random initial models, number i from the stream keyed by (seed, i); none is the run's usual one."""
    kind = method_class(config.modules["method"])
    for i in range(count):
        seed = key(config.seed, "independent start", i)
        network = kind.network(create(config.modules["model"], config.model, task, seed), config.method, seed)
        yield arrays_of(network)


def logs_replies(config: RunConfig, grid: Grid) -> bool:
    """Return whether accepted replies are logged.

    ``auto`` does so where a reply has cost the work of a device elsewhere, not where clients are part of this machine:
    there a crash costs at most one round of its own computing, and a run of small rounds would wait for its disk.
    """
    if config.checkpoint.log != "auto":
        return config.checkpoint.log
    return networked(config, grid)


def networked(config: RunConfig, grid: Grid) -> bool:
    """Return whether clients are reached over a network, not part of this machine."""
    return not (isinstance(grid, LocalClients) or engine_of(config.module("engine")).CAPABILITIES.simulates)


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits that are the same exactly for runs that compute the same."""
    decisive = {name: value for name, value in flatten(describe(config)).items() if name not in PLACES}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]


def federation_of(config: RunConfig, run: str, network: bool = False) -> Federation:
    """Return how the method meets its clients under `config`, on a `network` or on this machine."""
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


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what is computed, as JSON values."""
    plain: dict[str, Any] = config.model_dump(mode="json")
    idle = {"modules", *FREE}  # what decides nothing, or nothing in this run
    if not config.defence.enabled:
        idle.add("defence")
    if config.compression.exact:
        idle.add("compression")
    if not config.privacy.enabled:
        idle.add("privacy")
    if config.attack.name == "none":
        idle.add("attack")
    _as_before(plain)
    return {name: value for name, value in plain.items() if name not in idle} | {
        "names": {group: name for group, name in config.names.items() if group != "engine"}
    }


#: Settings that came later, with the value that says what runs from before did: left out where they have it, so that
#: such a run is still found and continued.
LATER: dict[str, dict[str, Any]] = {
    "method": {"independent_start": False, "unit": False, "ramp": None, "strategy": None, "arguments": {}},
    "partition": {"sampler": "keyed", "authors_seed": 1, "count": "train"},
}


def _as_before(plain: dict[str, Any]) -> None:
    """Write `plain`, the settings of a run, as a version without the later ones would, where that says the same."""
    for group, settings in LATER.items():
        for name, value in settings.items():
            if name in plain[group] and plain[group][name] == value:
                del plain[group][name]
    if plain["method"].get("mode") == "cross" and "propeller_weighting" in plain["method"]:
        plain["method"]["propeller_weighting"] = "alpha"  # plays no part; the default of older versions


def check_same(before: dict[str, Any], now: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Raise a ConfigError that names every setting in which a continued run differs from what it was.

    Settings in `may_change` and ``PLACES``, and what lies below them, may differ.
    """
    old, new = flatten(before), flatten(now)
    free_here = {*may_change, *PLACES}
    faults = [
        f"{name}: the run in that folder has {old.get(name)!r}, now it is {new.get(name)!r}. Resume needs the same."
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not any(f"{name}.".startswith(f"{free}.") for free in free_here)
    ]
    if faults:
        raise ConfigError(faults)


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level of dotted names."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def make_folder(config: RunConfig) -> Path:
    """Return the run's folder, made if it is not there."""
    folder = Path(config.resume or config.output or time.strftime("outputs/%Y-%m-%d/%H-%M-%S")).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    return folder


def write_model(path: Path, arrays: Arrays, again: Mapping[str, str] | None = None) -> None:
    """Write the global model so that ``safetensors`` and plain torch can load it; `again`: further names of arrays."""
    import numpy as np

    accounting.write_atomically(
        path, save({n: np.ascontiguousarray(a) for n, a in every_name(arrays, again or {}).items()})
    )
