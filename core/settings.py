"""Typed settings: their base class, faults in words, lookup of modules by name, overrides as text, this machine's own.

Every task, model and method that a configuration can choose is a module with the same name as its YAML file. The module
holds a ``Params`` class derived from :class:`Settings`; there is no registry.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.paths import extra_folders, room

#: What a configuration file says in place of a value that the user must give.
MISSING = "???"
#: pydantic's words -> ours.
_WORDS = {
    r"Input should be |Value error, |Assertion failed, ": "",
    r"(number|false|boolean|integer), (unable|got) .*": r"\1",
    r"a valid (tuple|list|array)": "a list",
    r"a valid dictionary or obj.*": "a number, or a schedule such as {schedule: cosine, start: 1, end: 0, rounds: 9}",
    r"a valid dictionary.*": "a mapping such as {NAME: VALUE}",
    r"a valid boolean": "true or false",
    r"a valid integer": "a whole number",
    r"a valid string": "text",
    r"a valid number": "a number",
    r"not a valid path": "a path",
    r"(Tuple|List) should have at least (\d+).*": r"a list of at least \2",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
}


class Settings(BaseModel):
    """Frozen, typed settings; unknown names and values out of range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_no_truths(cls, values: Any) -> Any:
        """Refuse true and false where a number is meant; pydantic would read them as 1 and 0."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                kinds = re.findall(r"\b(int|float|bool)\b", str(cls.model_fields[name].annotation))
                if kinds and "bool" not in kinds:
                    raise ValueError(f"{name}={_written(value)}: must be a number")
        return values


S = TypeVar("S", bound=Settings)


def parse(kind: type[S], values: Mapping[str, Any], where: str, faults: list[str]) -> S | None:
    """Build `kind` from `values`; append one sentence per fault to `faults` and return None if there are any.

    Parameters
    ----------
    kind : type
        The settings class.
    values : mapping
        Plain values as they come out of the configuration.
    where : str
        The configuration group, for messages: ``method``, ``task``, ...
    faults : list of str
        Receives the faults.
    """
    given = {name: value for name, value in values.items() if value != MISSING}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults += _sentences(kind, given, where, error)
    return None


def find(package: str, name: str, group: str) -> ModuleType:
    """Import ``package.name``, the module of `name` in configuration group `group`; ConfigError if there is none."""
    if not name.isidentifier() or importlib.util.find_spec(f"{package}.{name}") is None:
        folders = (room("conf"), *map(Path, extra_folders("conf")))
        known = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
        raise ConfigError(f"{group}.name={name!r}: there is no such {group}. {nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")


def _sentences(kind: type[BaseModel], values: Mapping[str, Any], where: str, error: ValidationError) -> list[str]:
    """Return one sentence for each setting of `kind` that `error` reports: its name, the value seen, what is allowed.

    pydantic reports each member of a union that it tried; what these reports ask for is joined by "or".
    """
    allowed: dict[str, dict[str, None]] = {}
    found: dict[str, str] = {}
    for fault in error.errors():
        place, value = _place(values, fault["loc"])
        missing = fault["type"] == "missing"
        place = (*place, fault["loc"][-1]) if missing else place
        name = ".".join(map(str, [*([where] if where else []), *place]))
        info = _fields(kind, place[:-1]).get(str(place[-1])) if place else None
        if fault["type"] == "extra_forbidden":
            found[name] = f"{name}: unknown setting. {nearest(str(place[-1]), list(_fields(kind, place[:-1])))}"
        elif missing or (value is None and info is not None and info.is_required()):
            example = info.examples[0] if info is not None and info.examples else "VALUE"
            found[name] = f"{name}: this setting is required. Write {name}={example}."
        elif fault["type"] in ("value_error", "assertion_error"):
            found.setdefault(*_own_words(name, value, _worded(fault["msg"]).rstrip(".")))
        else:
            asked = _worded(fault["msg"])
            if info is not None and info.examples:
                asked = f"written as {' or '.join(map(str, info.examples))}"
            elif fault["type"] in ("tuple_type", "list_type") and isinstance(value, int | float | str):
                asked += f". Write {name}=[{_written(value)}]"
            allowed.setdefault(f"{name}={_written(value)}", {})[asked] = None
    simple = {place: [one for one in asked if "mapping" not in one] or list(asked) for place, asked in allowed.items()}
    return [*found.values(), *(f"{place}: must be {' or '.join(asked)}." for place, asked in simple.items())]


def _own_words(name: str, value: Any, message: str) -> tuple[str, str]:
    """Return the setting that a check of ours is about, and the sentence; a group's message may begin with one."""
    first, _, rest = message.partition(" ")
    if isinstance(value, Mapping):
        if first.rstrip(":").partition("=")[0] in value:
            return f"{name}.{first}".lstrip("."), f"{name}.{first} {rest}.".lstrip(".")
        return name, f"{name}: {message}." if name else f"{message}."
    return name, f"{name}={_written(value)}: {message}."


def _worded(message: str) -> str:
    for theirs, ours in _WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


def _written(value: Any) -> str:
    """Return `value` as it is written on the command line, shortened if it is long."""
    plain = isinstance(value, str) and value and value == value.strip()
    text = str(value) if plain else json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 80 else f"{text[:80]}..."


def _place(values: Any, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], Any]:
    """Return the path to the faulty value in what the user gave, and that value.

    pydantic's path also names the members of unions that it tried; those are not in what was given.
    """
    place: list[str | int] = []
    for part in loc:
        entry = isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)
        if entry or (isinstance(values, Mapping) and part in values):
            values = values[part]
            place.append(part)
    return tuple(place), values


def _fields(kind: type[BaseModel], place: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the fields that the group of settings at `place` below `kind` may have."""
    owners: list[type[BaseModel]] = [kind]
    for part in place:
        if isinstance(part, str):
            inner = (owner.model_fields[part].annotation for owner in owners if part in owner.model_fields)
            owners = [found for annotation in inner for found in _classes(annotation)]
    return {name: info for owner in owners for name, info in owner.model_fields.items()}


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes in an annotation: members of unions, entries of lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)


# --- Overrides in Hydra's grammar as one text, as Flower's run config carries them.

#: Key of the run config (``[tool.flwr.app.config]`` in pyproject.toml) -> our setting. 0 or an empty text: not set.
TYPED = {
    "method": "method",
    "task": "task",
    "model": "model",
    "clients": "partition.clients",
    "clients-per-round": "clients_per_round",
    "rounds": "rounds",
    "local-epochs": "train.epochs",
    "learning-rate": "train.lr",
    "alpha": "method.alpha",
    "beta": "partition.beta",
    "seed": "seed",
}


def join(overrides: Sequence[str]) -> str:
    """Return `overrides` as one string for Flower's run config."""
    return shlex.join(overrides)


def split(text: str) -> list[str]:
    """Return the overrides in `text`, the inverse of :func:`join`; ConfigError if a quote or backslash has no end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"overrides={text}: {error}. As in a shell, a quote needs a second one, or a backslash before it."
        ) from error


def quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def unquote(text: str) -> str:
    """Return the value of a Hydra string; the inverse of :func:`quote`. Text without quotes stays as it is."""
    if len(text) < 2 or not text.startswith("'") or not text.endswith("'"):
        return text
    return re.sub(r"\\([\\'])", r"\1", text[1:-1])


def shown(folder: Path | str) -> str:
    """Return `folder` to be pasted in a shell behind ``resume=`` or ``output=``, quoted for both where needed."""
    text = str(folder)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return shlex.quote(quote(text)) if set(text) & set("'\"$`\\!") else f'"{quote(text)}"'


def overrides_of(run_config: Mapping[str, object], nodes: int | None = None) -> str:
    """Return the configuration in Flower's `run_config` as one text; ``overrides`` in it win over :data:`TYPED` keys.

    `nodes` is the number of simulated nodes: without ``overrides`` it stands for ``clients``, so that ``flwr run .``
    works with as many nodes as Flower simulates. ConfigError if then nothing says how many clients there are.
    """
    text = str(run_config.get("overrides", ""))
    given = split(text)
    named = {one.partition("=")[0].lstrip("+~") for one in given}
    typed = {
        setting: run_config[key]
        for key, setting in TYPED.items()
        if setting not in named and run_config.get(key) not in (None, "", 0)
    }
    if not given and "clients" in run_config:
        clients = typed.setdefault("partition.clients", nodes)
        if clients is None:
            raise ConfigError("How many clients has this federation? Say it: flwr run . --run-config 'clients=3'.")
        typed.setdefault("clients_per_round", min(10, int(str(clients))))
    return join([*(f"{setting}={value}" for setting, value in typed.items()), *given]) if typed else text


# --- What a machine and its operator decide, whatever configuration a run brings.

#: Environment variable: the device of this machine or container, in place of the run's ``device``.
DEVICE = "FEDCROSS_DEVICE"
DEVICE_NAMES = r"^(auto|cpu|cuda(:\d+)?|mps)$"


def device_name(configured: str) -> str:
    """Return the name of this machine's device: ``FEDCROSS_DEVICE``, otherwise `configured`; ConfigError if it is none.

    A federation has one configuration and many kinds of machines: a server without a GPU, clients with one.
    """
    own = os.environ.get(DEVICE, "")
    if own and not re.match(DEVICE_NAMES, own):
        raise ConfigError(f"{DEVICE}={own!r}: not a device. Choose auto, cpu, cuda, cuda:0 (or another GPU) or mps.")
    return own or configured


def gpus_for(name: str) -> int:
    """Return on how many GPUs clients may train: all for ``auto`` and ``cuda``, one for ``cuda:1``, otherwise none."""
    if name not in {"auto", "cuda"}:
        return int(name.startswith("cuda"))
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def node_name(partition: int) -> str:
    """Return the name under which an operator registers the key of `partition`; a device cannot change it."""
    return f"partition-{partition}"


def bound_partition(name: str) -> int | None:
    """Return the partition to which a node of this name is bound; None if to none."""
    found = re.fullmatch(r"partition-(0|[1-9]\d{0,8})", name)
    return int(found[1]) if found else None


def fingerprint(key: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a node's public `key`, its name in tables."""
    return hashlib.sha256(key).hexdigest()[:16]
