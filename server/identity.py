"""The identity of a run: the settings and data that determine its result. Equal identities mean the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError
from fedcross.strategies.registry import method_class
from fedcross.strategies.round.settings import FederationSettings
from fedcross.tasks.data import FederatedData

#: Settings that a resumed run may change: they do not change the result.
FREE = {
    *("rounds", "stop_at", "stop", "output", "resume", "engine", "logger", "log", "serve", "checkpoint", "snapshots"),
    *("device", "data_root", "federation"),
}
#: The same for settings inside groups: paths of the data.
PATHS = {"task.root", "task.download", "train.base"}
#: Settings of ``federation`` that change a result unless they have their default. A resumed run may change them.
RULES = ("min_replies", "enough_replies", "reassign", "hedge", "lead")
#: What each digest of a run's data is of.
DATA = {
    **{"train": "training examples", "test": "test examples", "clients": "indices of partition.file"},
    "base": "weights that train.only leaves untrained (random ones can differ between machines; train.base=FILE)",
}
#: Settings that a method lets a resumed run change, and that do not change the result.
DIAGNOSTIC = {"method.diagnostics_every"}


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the result, as JSON values, without paths and groups that are off."""
    plain: dict[str, Any] = config.model_dump(mode="json")
    off = {
        "defence": not config.defence.enabled,
        "compression": config.compression.exact,
        "privacy": not config.privacy.enabled,
        "attack": config.attack.name == "none",
        "clock": config.clock.name == "none",
        "devices": config.clock.name != "virtual" and not getattr(config.method, "widths", ()),
    }
    if config.clock.events is not None:  # the same record may lie elsewhere, or another one in its place
        plain["clock"]["events"] = digest_of_file(config.clock.events) or config.clock.events
    for path in PATHS:
        group, _, name = path.partition(".")
        plain[group].pop(name, None)
    idle = {"modules", *FREE, *(group for group, is_off in off.items() if is_off)}
    names = {group: name for group, name in config.names.items() if group != "engine"}
    return {name: value for name, value in plain.items() if name not in idle} | {"names": names}


def digest_of_settings(config: RunConfig) -> str:
    """Return the SHA-256 of the settings that determine the result."""
    decisive = flatten(describe(config)) | {f"federation.{rule}": value for rule, value in rules_of(config).items()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits; configurations with equal digits compute the same result on the same data."""
    return digest_of_settings(config)[:10]


def rules_of(config: RunConfig) -> dict[str, Any]:
    """Return those of :data:`RULES` that do not have their default."""
    usual, now = _rules(FederationSettings()), _rules(config.federation)
    return {rule: value for rule, value in now.items() if value != usual[rule]}


def _rules(settings: FederationSettings) -> dict[str, Any]:
    return {rule: to_jsonable_python(getattr(settings, rule)) for rule in RULES}


def stored(config: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint holds of :func:`describe`: the dotted settings that do not have their default."""
    usual = _defaults(config)
    return {name: value for name, value in flatten(describe(config)).items() if usual.get(name, ...) != value}


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Return the dotted defaults of the settings that `config` has; those without one are missing."""
    groups: dict[str, Any] = {n: type(group).model_construct() for n, group in config if isinstance(group, BaseModel)}
    return flatten(RunConfig.model_construct(**groups).model_dump(mode="json", warnings=False))


def differing(identity: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which `config` differs from the run with `identity`: name -> (before, now)."""
    new = flatten(describe(config))
    old = {name: value for name, value in _defaults(config).items() if name in new} | flatten(identity["config"])
    return {
        name: (old.get(name, "off"), new.get(name, "off"))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _allowed(name: str, config: RunConfig) -> bool:
    """Return whether the method lets a resumed run change the setting `name`."""
    return any(f"{name}.".startswith(f"{one}.") for one in method_class(config.modules["method"]).may_change)


def check_continues(identity: Mapping[str, Any], config: RunConfig) -> None:
    """Raise a ConfigError that lists the settings with which `config` does not continue the run with `identity`."""
    faults = [
        f"{name}: the run in that folder has {old!r}, now it is {new!r}. Resume needs the same."
        for name, (old, new) in differing(identity, config).items()
        if not _allowed(name, config)
    ]
    if faults:
        raise ConfigError(faults)


def changes(identity: Mapping[str, Any], config: RunConfig, done: int) -> list[dict[str, Any]]:
    """Return the settings that the run has changed since it began (``after``, ``setting``, ``from``, ``to``)."""
    found = {n: v for n, v in differing(identity, config).items() if n not in DIAGNOSTIC and _allowed(n, config)}
    before, now = _rules(FederationSettings()) | identity.get("rules", {}), _rules(config.federation)
    found |= {f"federation.{rule}": (before[rule], now[rule]) for rule in RULES if before[rule] != now[rule]}
    new = [{"after": done, "setting": name, "from": old, "to": value} for name, (old, value) in found.items()]
    return [*identity.get("changes", []), *new]


def digests_of(config: RunConfig, data: FederatedData) -> dict[str, str]:
    """Return the SHA-256 of the run's data, by the names in :data:`DATA`, as far as this process has them."""
    file = getattr(config.partition, "file", None)
    assigned = None if file is None else digest_of_file(file)
    return data.digests | ({"clients": assigned} if assigned else {})


def digest_of_file(path: Path | str) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def check_data(before: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Raise a ConfigError if the data `now` are not those of the run, `before`; missing parts are not compared."""
    faults = [
        f"data: the {DATA.get(part, part)} have SHA-256 {now[part][:16]}..., those of the run in that folder "
        f"{digest[:16]}... Resume needs the same data: name them with data_root= or task.root=, or start a new run."
        for part, digest in (before or {}).items()
        if part in now and now[part] != digest
    ]
    if faults:
        raise ConfigError(faults)


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one flat dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
