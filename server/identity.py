"""What a run is: the settings that decide what it computes, and whether two runs are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError

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


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits that are the same exactly for runs that compute the same."""
    decisive = {name: value for name, value in flatten(describe(config)).items() if name not in PLACES}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]


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
