"""Faults and warnings that involve more than one setting, or what is installed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.extras import install
from fedcross.core.site import device_name
from fedcross.strategies.defence.rules import JUDGED
from fedcross.strategies.round.federation import Meeting

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: What the live page needs.
PAGE_LIBRARIES = ("starlette", "uvicorn", "prometheus_client")

#: What is said besides of a run's folder that is missing at a server: the run may be known by its earlier place.
_MOVED = (
    " If it lies elsewhere at the server now, name its new place: fedcross deploy resume RUN resume=DIR, or fedcross "
    "resume=DIR engine.authority=FILE."
)
#: Engines whose clients run on this machine.
SIMULATING = frozenset({"local", "batched", "ray"})

#: A pool that mixes with the least similar model and keeps less than this of its own is not defended (measured:
#: docs/reliability.md).
ALPHA = 0.8


def cross_faults(config: RunConfig) -> list[str]:
    """Return the faults that involve more than one setting."""
    from fedcross.strategies.round.registry import method_class

    faults = []
    clients = getattr(config.partition, "clients", None)
    if isinstance(clients, int) and config.clients_per_round > clients:
        faults.append(
            f"clients_per_round={config.clients_per_round}: the federation has {clients} clients (partition.clients). "
            "Lower one or raise the other."
        )
    needed = config.federation.min_clients
    if needed is not None and isinstance(clients, int) and needed > clients:
        faults.append(f"federation.min_clients={needed}: the federation has {clients} clients. Lower it.")
    rules = config.federation
    if rules.min_replies > config.clients_per_round:
        faults.append(
            f"federation.min_replies={rules.min_replies}: no more than clients_per_round={config.clients_per_round} "
            "replies can come, every round would change nothing. Lower it."
        )
    if rules.enough_replies is not None and rules.enough_replies < rules.min_replies:
        faults.append(
            f"federation.enough_replies={rules.enough_replies}: fewer than min_replies={rules.min_replies}, every "
            "round would change nothing. Raise it or lower min_replies."
        )
    judged = min(JUDGED, config.clients_per_round)
    if config.defence.enabled and rules.enough_replies is not None and rules.enough_replies < judged:
        faults.append(
            f"federation.enough_replies={rules.enough_replies}: the defence needs {judged} replies to see which is "
            "unusual, no round would have them. Raise it."
        )
    if config.evaluate_clients and method_class(config.modules["method"]).personal:
        faults.append(
            f"evaluate_clients=true: method={config.names['method']} has no global model that clients could score. "
            "Turn it off; with evaluate_local=true each of a round's clients scores the model that it keeps."
        )
    if config.attack.name != "none" and isinstance(clients, int) and config.attack.clients > clients:
        faults.append(f"attack.clients={config.attack.clients}: the federation has {clients} clients. Lower it.")
    faults += _clock_faults(config)
    if config.train.base is not None and not config.train.only:
        faults.append(f"train.base={config.train.base!r}: without train.only there is no base. Set both or none.")
    faults += _privacy_faults(config) if config.privacy.enabled else []
    missing = [name for name in PAGE_LIBRARIES if config.serve.page and importlib.util.find_spec(name) is None]
    if missing:
        faults.append(f"serve.page=true: {', '.join(missing)} not installed. {install('page')}")
    own = getattr(config.method, "faults", None)
    faults += own(config.clients_per_round) if callable(own) else []
    uploads = getattr(config.method, "upload_faults", None)
    faults += uploads(config.compression.up) if callable(uploads) else []
    place = getattr(config.engine, "faults", None)
    faults += place(device_name(config.device)) if callable(place) else []
    faults += [
        f"logger.{name}: a user's name or password stands in this address, and the run's files would show it. Leave it "
        "out (logger=mlflow reads the variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD)."
        for name, value in config.logger.model_dump().items()
        if "@" in str(value).partition("://")[2].partition("/")[0]
    ]
    if config.resume is not None and not Path(config.resume).is_dir():
        moved = "" if getattr(config.engine, "authority", None) is None else _MOVED
        faults.append(f"resume={config.resume}: no such run folder. Name the folder of a run.{moved}")
    elif config.resume and config.output and Path(config.resume).resolve() != Path(config.output).resolve():
        faults.append(
            f"output={config.output}: a continued run stays in its folder, resume={config.resume}. Leave out output=, "
            "or copy the folder first and continue the copy."
        )
    return faults


def _clock_faults(config: RunConfig) -> list[str]:
    """Return errors where method, clock and engine do not fit each other."""
    from fedcross.strategies.round.registry import method_class

    name, clock = f"method={config.names['method']}", config.clock.name
    kind = method_class(config.modules["method"])
    if not kind.asynchronous:
        if clock == "virtual" and kind.Objective.pooled:
            return [f"clock=virtual: {name} trains on all clients' data in one place, no device. Choose clock=none."]
        if clock in ("none", "virtual"):
            return []
        return [
            f"clock={clock}: {name} waits for whole rounds. Choose an asynchronous method (fedcross_async, gitfl, "
            "fedasync, fedbuff), clock=virtual or clock=none."
        ]
    faults = []
    if clock == "none":
        faults.append(f"clock=none: {name} is asynchronous. Choose clock=virtual, or clock=real on a network.")
    if clock == "real" and config.names["engine"] in SIMULATING:
        faults.append(
            f"clock=real: engine={config.names['engine']} simulates its clients. Choose clock=virtual, or "
            "engine=superlink or remote."
        )
    if config.defence.enabled:
        faults.append(f"defence.enabled=true: it compares the uploads of a round, {name} gets them one by one.")
    if config.compression.down != "float32":
        faults.append(f"compression.down={config.compression.down}: {name} sends full models. Compress uploads only.")
    rules, usual = config.federation, Meeting()
    return faults + [
        f"federation.{setting}: it is about whole rounds, {name} has none. Leave it unset."
        for setting in ("min_replies", "enough_replies", "reassign", "hedge")
        if getattr(rules, setting) != getattr(usual, setting)
    ]


def _privacy_faults(config: RunConfig) -> list[str]:
    """Return errors for settings that would make a client send unprotected values beside its noised model."""
    from fedcross.strategies.round.registry import method_class

    faults = [
        f"{name}=true: a client's accuracy leaves it without noise. Turn it or privacy.enabled off."
        for name in ("evaluate_local", "evaluate_clients")
        if getattr(config, name)
    ]
    if method_class(config.modules["method"]).reveals(config.method):
        other = " or method.masked=false" if hasattr(config.method, "masked") else ""
        faults.append(
            f"privacy.enabled=true: method={config.names['method']} sends more than its model, which nothing protects. "
            f"Choose fedavg, fedprox or fedcross{other}."
        )
    own = getattr(config.method, "privacy_faults", None)
    faults += own(config.clients_per_round) if callable(own) else []
    if importlib.util.find_spec("opacus") is None:
        faults.append(f"privacy.enabled=true: opacus, the accountant, is not installed. {install('privacy')}.")
    return faults


def remarks(config: RunConfig) -> list[str]:
    """Return warnings about settings that are allowed but unusual."""
    from fedcross.strategies.round.registry import method_class

    remark = getattr(config.method, "remarks", None)
    found = list(remark()) if callable(remark) else []
    rounds = getattr(config.method, "round_remarks", None)
    found += rounds(config.clients_per_round) if callable(rounds) else []
    place = getattr(config.engine, "remarks", None)
    found += place(device_name(config.device)) if callable(place) else []
    nodes, clients = getattr(config.engine, "node_remarks", None), getattr(config.partition, "clients", None)
    found += nodes(clients) if callable(nodes) and isinstance(clients, int) else []
    found += _width_remarks(config) + _clock_remarks(config)
    defends = config.defence.enabled and method_class(config.modules["method"]).defended
    if defends and config.clients_per_round < JUDGED:
        alone = "a reply has none to be compared with, so nothing bounds it"
        of = alone if config.clients_per_round == 1 else "of two replies neither stands out, so one can stop the run"
        found.append(f"defence.enabled=true, clients_per_round={config.clients_per_round}: {of}. Choose 3 or more.")
    enough = config.federation.enough_replies
    if defends and enough is not None and JUDGED <= enough < config.clients_per_round:
        found.append(
            f"defence.enabled=true, federation.enough_replies={enough} of {config.clients_per_round}: the first "
            f"replies count, so {(enough + 1) // 2} hostile devices that answer first are half of a round. Raise it."
        )
    if defends and (alpha := _weakest_alpha(config)) < ALPHA:
        found.append(
            f"defence.enabled=true, method.selection=lowest_similarity, method.alpha={alpha:g}: all take 1 - alpha of "
            "the model that differs most, so one hostile device can ruin the pool, and nothing looks too long. Choose "
            f"method.selection=least_similar_derangement, or an alpha of {ALPHA:g} or more."
        )
    if config.defence.enabled and config.modules["method"] == "scaffold":
        found.append(
            "defence.enabled=true: it shortens the models that SCAFFOLD's clients send, not their control variates, "
            "which then describe longer ways than the models went, and the server keeps one for every client. "
            "SCAFFOLD as published: defence.enabled=false."
        )
    method: Any = config.method
    if config.defence.enabled and config.modules["method"] == "fedfan" and method.memory_mb and not method.cuts():
        found.append(
            "defence.enabled=true: it shortens uploads before FedFan corrects them; a corrected one can be about three "
            "times as long. Without correction: method.memory_mb=0."
        )
    visits = config.rounds * config.clients_per_round
    if (buffer := getattr(config.method, "buffer", 0)) > visits and config.modules["method"] == "fedbuff":
        found.append(
            f"method.buffer={buffer}: the run makes {visits} visits (rounds x clients_per_round), so the server takes "
            "no step and the model stays as it begins. Lower it, or raise rounds."
        )
    if config.privacy.enabled and config.privacy.randomness == "seed":
        found.append("privacy.randomness=seed: who knows the seed can take the noise off again. For experiments only.")
    return found


def _weakest_alpha(config: RunConfig) -> float:
    """Return the smallest alpha of a pool whose models all mix with the least similar one; 1 for all others."""
    method: Any = config.method
    if getattr(method, "selection", None) != "lowest_similarity" or not hasattr(method, "alpha"):
        return 1.0
    return min(map(float, method.alpha.values()))


def _clock_remarks(config: RunConfig) -> list[str]:
    """Return warnings about settings of the clock that have no effect."""
    from fedcross.strategies.round.registry import method_class

    found, devices = [], config.devices
    if config.clock.deadline_s is not None and not method_class(config.modules["method"]).asynchronous:
        found.append(
            f"clock.deadline_s={config.clock.deadline_s:g}: method={config.names['method']} waits for whole rounds, so "
            "it has no effect. Leave it out; federation.deadline_s ends an exchange, in real seconds."
        )
    timed = [getattr(devices, name) for name in ("training", "seconds_per_example", "bytes_per_second")]
    if config.clock.name == "none" and devices.name != "uniform" and devices.widths is None and any(timed):
        found.append(
            f"devices={devices.name}: without a clock nothing takes time, so it has no effect. Choose clock=virtual, "
            "or leave it out."
        )
    return found


def _width_remarks(config: RunConfig) -> list[str]:
    """Return warnings where models have widths and devices have none, or the other way round."""
    widths = getattr(config.method, "widths", ())
    if config.devices.widths is not None and not widths:
        name = f"method={config.names['method']}"
        return [f"devices={config.devices.name}: {name} sends full models to every device, whatever its width."]
    if len(widths) > 1 and config.devices.widths is None and config.names["engine"] in SIMULATING:
        return [
            f"method.widths={list(widths)}: every simulated device can train the full model, because devices="
            f"{config.devices.name} has no widths. Choose devices=three_sizes, or set devices.widths."
        ]
    return []
