"""The identity of a run: the settings and data that determine its result. Equal identities mean the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError
from fedcross.strategies.round.settings import FederationSettings

if TYPE_CHECKING:
    from fedcross.tasks.data import FederatedData

#: Settings that a resumed run may change: they do not change the result.
FREE = frozenset(
    {
        *("rounds", "stop_at", "stop", "output", "resume", "engine", "logger", "log", "serve", "checkpoint"),
        *("snapshots", "device", "data_root", "federation"),
    }
)
#: The same for settings inside groups: paths of the data.
PATHS = frozenset({"task.root", "task.download", "train.base"})
#: Settings of ``federation`` that change a result unless they have their default. A resumed run may change them.
RULES = ("min_replies", "enough_replies", "reassign", "hedge", "lead")
#: What each digest of a run's data is of.
DATA = {"train": "training examples", "test": "test examples", "clients": "indices of partition.file"}
SAME_DATA = "Resume needs the same data: name them with data_root= or task.root=, or start a new run."
#: Settings that a method lets a resumed run change, and that do not change the result.
DIAGNOSTIC = frozenset({"method.diagnostics_every", "method.storage"})


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the result, as JSON values; groups that are switched off are left out."""
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
        plain["clock"]["events"] = digest_of_file(Path(config.clock.events)) or config.clock.events
    idle = {"modules", *FREE, *(group for group, is_off in off.items() if is_off)}
    names = {group: name for group, name in config.names.items() if group != "engine"}
    return {name: value for name, value in plain.items() if name not in idle} | {"names": names}


def without_paths(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`describe` returned without the paths of this machine."""
    return {
        group: {name: v for name, v in one.items() if f"{group}.{name}" not in PATHS} if isinstance(one, dict) else one
        for group, one in described.items()
    }


def digest_of_settings(config: RunConfig) -> str:
    """Return the SHA-256 of the settings that determine the result."""
    decisive = flatten(without_paths(describe(config)))
    decisive |= {f"federation.{rule}": value for rule, value in rules_of(config).items()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits; configurations with equal digits compute the same result on the same data."""
    return digest_of_settings(config)[:10]


def rules_of(config: RunConfig) -> dict[str, Any]:
    """Return those of :data:`RULES` that do not have their default."""
    usual = FederationSettings()
    found = {rule: getattr(config.federation, rule) for rule in RULES}
    return {rule: to_jsonable_python(v) for rule, v in found.items() if v != getattr(usual, rule)}


def may_change(config: RunConfig) -> frozenset[str]:
    """Return the settings that the method lets a resumed run change."""
    from fedcross.strategies.round.registry import method_class

    return frozenset(method_class(config.modules["method"]).may_change)


def differing(identity: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which `config` differs from the run with `identity`: name -> (before, now)."""
    old, new = flatten(identity["config"]), flatten(without_paths(describe(config)))
    return {
        name: (old.get(name, "off"), new.get(name, "off"))
        for name in sorted((old.keys() | new.keys()) - PATHS)
        if old.get(name) != new.get(name)
    }


def check_continues(identity: Mapping[str, Any], config: RunConfig) -> None:
    """Raise a ConfigError that lists the settings with which `config` does not continue the run with `identity`."""
    allowed = may_change(config)
    faults = [
        f"{name}: the run in that folder has {old!r}, now it is {new!r}. Resume needs the same."
        for name, (old, new) in differing(identity, config).items()
        if not _within(name, allowed)
    ]
    if faults:
        raise ConfigError(faults)


def changes(identity: Mapping[str, Any], config: RunConfig, done: int) -> list[dict[str, Any]]:
    """Return the settings that the run has changed since it began, with ``after``, ``setting``, ``from`` and ``to``.

    `identity` is that of the checkpoint of round `done`; `config` continues it.
    """
    allowed = may_change(config) - DIAGNOSTIC
    found = [(name, a, b) for name, (a, b) in differing(identity, config).items() if _within(name, allowed)]
    usual = {rule: to_jsonable_python(getattr(FederationSettings(), rule)) for rule in RULES}
    before, now = usual | identity.get("rules", {}), usual | rules_of(config)
    found += [(f"federation.{rule}", before[rule], now[rule]) for rule in RULES if before[rule] != now[rule]]
    return [*identity.get("changes", []), *({"after": done, "setting": n, "from": a, "to": b} for n, a, b in found)]


def _within(name: str, settings: frozenset[str]) -> bool:
    return any(f"{name}.".startswith(f"{setting}.") for setting in settings)


def check_base(identity: Mapping[str, Any], now: str) -> None:
    """Raise a ConfigError if the untrained rest of the model (``train.only``) has another digest than in `identity`."""
    before = identity.get("base", "")
    if before != now:
        raise ConfigError(
            f"train.only: the rest of the model has SHA-256 {now[:16]}..., in that folder it has {before[:16]}... "
            "Random weights can differ between machines. Resume where the run began, or start with train.base=FILE."
        )


def digests_of(config: RunConfig, data: FederatedData) -> dict[str, str]:
    """Return the SHA-256 of the run's data, by the names in :data:`DATA`, as far as this process has them."""
    return data.digests | assignment_digest(config)


def assignment_digest(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the file that assigns the examples to clients; nothing if there is none."""
    file = getattr(config.partition, "file", None)
    found = None if file is None else digest_of_file(Path(file))
    return {"clients": found} if found else {}


def digest_of_file(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def check_data(before: Mapping[str, str] | None, now: Mapping[str, str], cure: str = SAME_DATA) -> None:
    """Raise a ConfigError if the data `now` are not those of the run, `before`; missing parts are not compared."""
    faults = [
        f"data: the {DATA.get(part, part)} have SHA-256 {now[part][:16]}..., those of the run in that folder "
        f"{digest[:16]}... {cure}"
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
