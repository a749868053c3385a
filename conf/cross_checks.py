"""Faults and warnings that involve several settings, or what is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import ConfigError
from fedcross.core.settings import device_name
from fedcross.strategies.filters.defence import JUDGED
from fedcross.strategies.parts.schedule import values_of
from fedcross.strategies.round.settings import faults_of_visits

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: Engines whose clients run on this machine.
SIMULATING = frozenset({"local", "batched", "ray"})
#: A pool that mixes with the least similar model and a smaller alpha is not defended (docs/reliability.md).
ALPHA = 0.8


def cross_faults(config: RunConfig) -> list[str]:
    """Return the faults that involve several settings."""
    faults = _count_faults(config) + _clock_faults(config) + _folder_faults(config)
    name = config.names["method"]
    if config.evaluate_clients and _kind(config).personal:
        lacks = f"method={name} has no global model that clients could score"
        faults.append(f"evaluate_clients=true: {lacks}. Turn it off, or set evaluate_local=true.")
    if config.train.base is not None and not config.train.only:
        faults.append(f"train.base={config.train.base!r}: without train.only there is no base. Set both or none.")
    if config.stop.metric is not None and config.stop.patience is None and config.stop.target is None:
        faults.append(f"stop.metric={config.stop.metric}: set stop.patience or stop.target too.")
    if config.privacy.enabled:
        faults += _privacy_faults(config)
    try:
        config.new_objective()
    except ConfigError as error:  # the method's server cannot serve it
        faults += error.faults
    faults += _asked(config.method, "faults", config.clients_per_round)
    faults += _asked(config.method, "upload_faults", config.compression.up)
    return faults + _asked(config.engine, "faults", device_name(config.device))


def _kind(config: RunConfig) -> Any:
    from fedcross.strategies.registry import method_class

    return method_class(config.modules["method"])


def _asked(settings: Any, hook: str, *arguments: Any) -> list[str]:
    """Return the sentences of an optional check that a method or an engine defines for its own settings."""
    found = getattr(settings, hook, None)
    return list(found(*arguments)) if callable(found) else []


def _count_faults(config: RunConfig) -> list[str]:
    """Return faults of numbers of clients and of replies."""
    faults, rules, per_round = [], config.federation, config.clients_per_round
    clients = getattr(config.partition, "clients", None)
    if isinstance(clients, int):
        counts = {
            "clients_per_round": per_round,
            "federation.min_clients": rules.min_clients or 0,
            "attack.clients": config.attack.clients if config.attack.name != "none" else 0,
        }
        faults += [
            f"{name}={count}: the federation has {clients} clients (partition.clients). Lower it."
            for name, count in counts.items()
            if count > clients
        ]
    least, enough = rules.min_replies, rules.enough_replies
    if least > per_round:
        more = f"more than clients_per_round={per_round}"
        faults.append(f"federation.min_replies={least}: {more}, so no round would change the model. Lower it.")
    needed = max(least, min(JUDGED, per_round) if config.defence.enabled else 0)
    if enough is not None and enough < needed:
        why = f"min_replies or the defence needs {needed} replies"
        faults.append(f"federation.enough_replies={enough}: {why}, so no round would change the model. Raise it.")
    return faults


def _folder_faults(config: RunConfig) -> list[str]:
    """Return faults of the run's folder."""
    if config.resume is not None and not Path(config.resume).is_dir():
        return [f"resume={config.resume}: no such run folder. Name the folder of a run."]
    if config.resume and config.output and Path(config.resume).resolve() != Path(config.output).resolve():
        stays = f"a resumed run stays in its folder, resume={config.resume}"
        return [f"output={config.output}: {stays}. Leave out output=."]
    return []


def _clock_faults(config: RunConfig) -> list[str]:
    """Return faults where method, clock and engine do not fit each other."""
    name, clock, kind = f"method={config.names['method']}", config.clock.name, _kind(config)
    if not kind.asynchronous:
        if clock == "virtual" and kind.Objective.pooled:
            return [f"clock=virtual: {name} trains on all clients' data in one place, no device. Choose clock=none."]
        if clock in ("none", "virtual"):
            return []
        return [f"clock={clock}: {name} waits for whole rounds. Choose an asynchronous method or clock=virtual."]
    faults = []
    if clock == "none":
        faults.append(f"clock=none: {name} is asynchronous. Choose clock=virtual, or clock=real on a network.")
    if clock == "real" and config.names["engine"] in SIMULATING:
        faults.append(f"clock=real: engine={config.names['engine']} simulates its clients. Choose clock=virtual.")
    return faults + faults_of_visits(config.federation, config.defence, config.compression)


def _privacy_faults(config: RunConfig) -> list[str]:
    """Return faults of settings with which a client would send values that are not protected."""
    # Simulated clients are tested on rows of the central test set, which the server has: they reveal nothing.
    on_devices = config.names["engine"] not in SIMULATING
    sent = {"evaluate_local": config.evaluate_local, "evaluate_clients": config.evaluate_clients and on_devices}
    faults = [
        f"{name}=true: an accuracy on a client's own data would be sent without noise, and epsilon does not cover it. "
        "Turn it or privacy.enabled off."
        for name, wanted in sent.items()
        if wanted
    ]
    if config.new_objective().sends:
        more = f"method={config.names['method']} sends more than its model, which is not protected"
        other = " or method.masked=false" if hasattr(config.method, "masked") else ""
        faults.append(f"privacy.enabled=true: {more}. Choose fedavg, fedprox or fedcross{other}.")
    return faults + _asked(config.method, "privacy_faults", config.clients_per_round)


def remarks(config: RunConfig) -> list[str]:
    """Return warnings about settings that are allowed but unusual."""
    found = _asked(config.method, "remarks")
    found += _asked(config.engine, "remarks", device_name(config.device))
    if isinstance(clients := getattr(config.partition, "clients", None), int):
        found += _asked(config.engine, "node_remarks", clients)
    found += _device_remarks(config)
    defends = config.defence.enabled and _kind(config).comparable
    if defends and config.clients_per_round < JUDGED:
        few = f"clients_per_round={config.clients_per_round}: the defence cannot compare so few replies"
        found.append(f"defence.enabled=true, {few}. Choose 3 or more.")
    method: Any = config.method
    lowest = getattr(method, "selection", None) == "lowest_similarity" and hasattr(method, "alpha")
    if defends and lowest and (alpha := min(map(float, values_of(method.alpha)))) < ALPHA:
        found.append(
            f"defence.enabled=true, method.selection=lowest_similarity, method.alpha={alpha:g}: every model mixes with "
            "the one that differs most, so one hostile device can ruin the pool. Choose "
            f"method.selection=least_similar_derangement, or an alpha of {ALPHA:g} or more."
        )
    visits = config.rounds * config.clients_per_round
    if config.modules["method"] == "fedbuff" and (buffer := getattr(config.method, "buffer", 0)) > visits:
        found.append(f"method.buffer={buffer}: the run makes {visits} visits, so the model never changes. Lower it.")
    if config.privacy.enabled and config.privacy.randomness == "seed":
        found.append("privacy.randomness=seed: whoever knows the seed can remove the noise. For experiments only.")
    return found


def _device_remarks(config: RunConfig) -> list[str]:
    """Return warnings about settings of clock and devices that have no effect."""
    found, devices, method = [], config.devices, f"method={config.names['method']}"
    if config.clock.deadline_s is not None and not _kind(config).asynchronous:
        idle = f"{method} waits for whole rounds, so it has no effect"
        found.append(f"clock.deadline_s={config.clock.deadline_s:g}: {idle}. federation.deadline_s ends an exchange.")
    timed = any(getattr(devices, name) for name in ("training", "seconds_per_example", "bytes_per_second"))
    if config.clock.name == "none" and devices.name != "uniform" and devices.widths is None and timed:
        found.append(f"devices={devices.name}: no effect without a clock. Choose clock=virtual, or leave it out.")
    widths = getattr(config.method, "widths", ())
    if devices.widths is not None and not widths:
        found.append(f"devices={devices.name}: {method} sends full models to every device, whatever its width.")
    elif len(widths) > 1 and devices.widths is None and config.names["engine"] in SIMULATING:
        full = f"devices={devices.name} has no widths, so every device trains the full model"
        found.append(f"method.widths={list(widths)}: {full}. Choose devices=three_sizes, or set devices.widths.")
    return found
