"""The identity of a run: the settings that determine its result. Two runs with equal identities are the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError

#: Settings that may differ between a run and its continuation: they do not change the result.
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
#: The same for settings inside groups: paths of the data set.
PLACES = {"task.root", "task.download", "train.base"}


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits; two configurations have equal digits exactly if they compute the same result."""
    decisive = {name: value for name, value in flatten(describe(config)).items() if name not in PLACES}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the result, as JSON values."""
    plain: dict[str, Any] = config.model_dump(mode="json")
    idle = {"modules", *FREE}  # settings without an effect, in general or in this run
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


#: Settings added by later versions, each with the value that stands for the old behaviour. A setting with that value is
#: left out of the identity, so that runs of older versions are still found and continued.
LATER: dict[str, dict[str, Any]] = {
    "method": {"independent_start": False, "unit": False, "ramp": None, "strategy": None, "arguments": {}},
    "partition": {"sampler": "keyed", "authors_seed": 1, "count": "train"},
    "train": {"only": [], "base": None, "base_sha256": None},
}


def _as_before(plain: dict[str, Any]) -> None:
    """Change `plain`, the settings of a run, to what an older version would have written for the same run."""
    for group, settings in LATER.items():
        for name, value in settings.items():
            if name in plain[group] and plain[group][name] == value:
                del plain[group][name]
    if plain["method"].get("mode") == "cross" and "propeller_weighting" in plain["method"]:
        plain["method"]["propeller_weighting"] = "alpha"  # has no effect here; write the default of older versions


def check_same(before: dict[str, Any], now: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Raise a ConfigError that lists every setting in which a continued run differs from the run in the folder.

    Settings in `may_change` and ``PLACES``, and all settings below them, may differ.
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


def check_base(identity: dict[str, Any], now: str) -> None:
    """Raise a ConfigError if the untrained rest of the model (``train.only``) has another digest than in `identity`."""
    before = identity.get("base", "")
    if before != now:
        raise ConfigError(
            f"train.only: the rest of the model has SHA-256 {now[:16]}..., in that folder it has {before[:16]}... "
            "Random weights can differ between machines. Resume where the run began, or start with train.base=FILE."
        )


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one flat dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
