"""The identity of a run: the settings that determine its result. Two runs with equal identities are the same run."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from fedcross.conf.later import LATER, as_before
from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.round.federation import Meeting

if TYPE_CHECKING:
    from fedcross.tasks.data import FederatedData

#: Settings that may differ between a run and its continuation: they do not change the result.
FREE = {
    "rounds",
    "stop_at",
    "output",
    "resume",
    "engine",
    "logger",
    "log",
    "serve",
    "checkpoint",
    "snapshots",
    "device",
    "data_root",
    "federation",
}
#: The same for settings inside groups: paths of the data set.
PLACES = {"task.root", "task.download", "train.base"}
#: Settings of ``federation`` that decide a result unless they have their default. A continued run may change them.
RULES = ("min_replies", "enough_replies", "reassign", "hedge", "lead")
#: What the digests of a run's data are of, in words.
DATA = {"train": "training examples", "test": "test examples", "clients": "indices of partition.file"}
#: What helps who continues a run on other data.
SAME_DATA = "Resume needs the same data: say where they lie with data_root= or task.root=, or start a new run."
#: Settings that a continued run may change where its method says so, and that leave the result alone.
UNFELT = {"method.diagnostics_every", "method.storage"}
#: How the digest begins that stands for the file of ``clock.events``.
TOLD = "SHA-256 "


def fingerprint(config: RunConfig) -> str:
    """Return ten hexadecimal digits; two configurations with equal digits compute the same result on the same data.

    Where the data lie is no part of them, nor are the data themselves: :func:`digests_of` tells these apart.
    """
    return digest_of_settings(config)[:10]


def digest_of_settings(config: RunConfig) -> str:
    """Return the SHA-256 of the settings that determine the result."""
    decisive = {name: value for name, value in flatten(describe(config)).items() if name not in PLACES}
    decisive |= {f"federation.{rule}": value for rule, value in rules_of(config).items()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def rules_of(config: RunConfig) -> dict[str, Any]:
    """Return those of :data:`RULES` that do not have their default."""
    return {rule: value for rule, value in _rules(config.federation).items() if value != _rules(Meeting())[rule]}


def _rules(federation: Meeting) -> dict[str, Any]:
    return {rule: to_jsonable_python(getattr(federation, rule)) for rule in RULES}


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
    if config.clock.name != "virtual" and not getattr(config.method, "widths", ()):
        idle.add("devices")
    if config.clock.name == "none":
        idle.add("clock")
    if config.clock.events is not None:  # the same record may lie elsewhere, and another one in its place
        plain["clock"]["events"] = _told(Path(config.clock.events))
    as_before(plain)
    return {name: value for name, value in plain.items() if name not in idle} | {
        "names": {group: name for group, name in config.names.items() if group != "engine"}
    }


def without_places(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`describe` returned without paths of this machine (:data:`PLACES`)."""
    return {
        group: {name: value for name, value in one.items() if f"{group}.{name}" not in PLACES}
        if isinstance(one, dict)
        else one
        for group, one in described.items()
    }


def _told(events: Path) -> str:
    """Return what stands for a record of visits in a run's identity; its path if it cannot be read."""
    try:
        return TOLD + hashlib.sha256(events.read_bytes()).hexdigest()
    except OSError:
        return str(events)


#: Groups that :func:`describe` leaves out while they are off. One of them missing does not mean that it is new.
SWITCHED = {"defence", "compression", "privacy", "attack", "clock", "devices"}


def check_continues(identity: Mapping[str, Any], config: RunConfig) -> None:
    """Raise a ConfigError if `config` does not continue the run with this `identity`, as its checkpoint holds it."""
    from fedcross.strategies.round.registry import method_class

    may_change = {*method_class(config.modules["method"]).may_change}
    before = _before(identity)
    if not str(before.get("clock", {}).get("events") or TOLD).startswith(TOLD):  # a path, of an older version
        may_change.add("clock.events")
    check_same(before, describe(config), may_change, defaults(config) | before_later(config))


def changes(identity: Mapping[str, Any], config: RunConfig, done: int) -> list[dict[str, Any]]:
    """Return which settings that decide the result the run with this `identity` has changed, and after which round.

    To what its checkpoint of round `done` says is added in what `config`, with which it goes on, differs. An entry has
    ``after``, ``setting``, ``from`` and ``to``. Rules of ``federation`` are compared if the checkpoint has them.
    """
    from fedcross.strategies.round.registry import method_class

    may = set(method_class(config.modules["method"]).may_change) - UNFELT
    before, now = _before(identity), describe(config)
    old, new = flatten(before), flatten(now)
    felt = [
        (name, old.get(name), new.get(name))
        for name, _, _ in differing(before, now, (), defaults(config) | before_later(config))
        if any(f"{name}.".startswith(f"{one}.") for one in may)
    ]
    if (kept := identity.get("rules")) is not None:
        rules, usual = _rules(config.federation), _rules(Meeting())
        felt += [(f"federation.{rule}", kept.get(rule, usual[rule]), rules[rule]) for rule in RULES]
    told = [{"after": done, "setting": name, "from": a, "to": b} for name, a, b in felt if a != b]
    return [*identity.get("changes", []), *told]


def unlike_replayed(identity: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return a sentence for each setting in which `config` is not that of the run with this `identity` that it repeats.

    How long visits take, and when one is lost, the record of visits says.
    """
    standard = defaults(config) | before_later(config)
    found = differing(
        _before(identity), describe(config), ("clock", "devices", "names.clock", "names.devices"), standard
    )
    return [f"{name} was {old}, and is {new}" for name, old, new in found]


def _before(identity: Mapping[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(dict(identity["config"]))
    as_before(before)
    return before


def check_same(
    before: dict[str, Any],
    now: dict[str, Any],
    may_change: Collection[str] = (),
    standard: Mapping[str, Any] | None = None,
) -> None:
    """Raise a ConfigError that lists every setting in which a continued run differs from the run in the folder.

    The arguments are those of :func:`differing`.
    """
    faults = [
        f"{name}: the run in that folder has {old}, now it is {new}. Resume needs the same."
        for name, old, new in differing(before, now, may_change, standard)
    ]
    if faults:
        raise ConfigError(faults)


def differing(
    before: dict[str, Any],
    now: dict[str, Any],
    may_change: Collection[str] = (),
    standard: Mapping[str, Any] | None = None,
) -> list[tuple[str, str, str]]:
    """Return the dotted name of each setting in which two descriptions differ, and both values as text.

    Settings in `may_change` and ``PLACES``, and all settings below them, may differ. A setting that `before` does not
    have, because its version did not know it, may have the value that it has in `standard`.
    """
    old, new = flatten(before), flatten(now)
    free_here = {*may_change, *PLACES}
    added = {name for name, value in (standard or {}).items() if name not in old and name in new and new[name] == value}
    added -= {name for name in added if (group := name.split(".")[0]) in SWITCHED and group not in before}
    usual = {name: value for name, value in (standard or {}).items() if name.split(".")[0] not in SWITCHED}

    def said(values: Mapping[str, Any], name: str) -> str:
        known = name in values or name.split(".")[0] not in SWITCHED
        return repr(values.get(name, usual.get(name))) if known else "off"

    return [
        (name, said(old, name), said(new, name))
        for name in sorted((old.keys() | new.keys()) - added)
        if old.get(name) != new.get(name) and not any(f"{name}.".startswith(f"{free}.") for free in free_here)
    ]


def defaults(config: RunConfig) -> dict[str, Any]:
    """Return the default of every setting of `config` that has one in its class, with dotted names, as JSON values."""
    return flatten(_defaults(config))


def before_later(config: RunConfig) -> dict[str, Any]:
    """Return what stands for the old behaviour of those settings of `config` that came later, with dotted names."""
    older = {f"{group}.{name}": value for group, settings in LATER.items() for name, value in settings.items()}
    known = defaults(config)
    return {name: value for name, value in older.items() if name in known}


def _defaults(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        plain = None if default is PydanticUndefined else to_jsonable_python(default)  # as `describe` writes it
        if default is not PydanticUndefined and not isinstance(plain, dict):
            found[name] = plain
        elif isinstance(value, Settings):
            found[name] = _defaults(value)
    return found


def check_base(identity: dict[str, Any], now: str) -> None:
    """Raise a ConfigError if the untrained rest of the model (``train.only``) has another digest than in `identity`."""
    before = identity.get("base", "")
    if before != now:
        raise ConfigError(
            f"train.only: the rest of the model has SHA-256 {now[:16]}..., in that folder it has {before[:16]}... "
            "Random weights can differ between machines. Resume where the run began, or start with train.base=FILE."
        )


def digests_of(config: RunConfig, data: FederatedData) -> dict[str, str]:
    """Return the SHA-256 of the data of a run, by the names in :data:`DATA`, as far as this process has them.

    They tell two data sets in two folders apart, or a file and the one that has replaced it; the settings do not.
    """
    return data.digests | assigned(config)


def assigned(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the file that assigns the examples to clients; nothing if there is none."""
    file = getattr(config.partition, "file", None)
    try:
        return {} if file is None else {"clients": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
    except OSError:
        return {}


def other_data(before: Mapping[str, str], now: Mapping[str, str], where: str = "the run in that folder") -> list[str]:
    """Return a sentence for each part of the data that two processes have, and have with different digests."""
    return [
        f"data: the {DATA.get(part, part)} have SHA-256 {now[part][:16]}..., those of {where} {digest[:16]}..."
        for part, digest in before.items()
        if part in now and now[part] != digest
    ]


def check_data(before: Mapping[str, str] | None, now: Mapping[str, str], cure: str = SAME_DATA) -> None:
    """Raise a ConfigError if the data `now` are not those of the run that is continued.

    `before` is what its checkpoint holds; a checkpoint of an older version has nothing, and fits all data.
    """
    if faults := other_data(before or {}, now):
        raise ConfigError([f"{fault} {cure}" for fault in faults])


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one flat dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
