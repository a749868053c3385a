"""``fedcross record verify``: runs rounds of a record again and compares them with what the record says."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from numpy.random import Generator

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.overrides import quote
from fedcross.core.randomness import stream
from fedcross.server.checkpoint import DIGESTS, Checkpoints
from fedcross.server.visit_ledger import NAME as VISITS

#: Settings of a record that say where and how it ran, not what.
MACHINES = {
    "output",
    "resume",
    "stop_at",
    "data_root",
    "device",
    "engine",
    "logger",
    "log",
    "serve",
    "checkpoint",
    "snapshots",
    "rounds",
}
#: Up to which round rounds are run from the start for the sake of a digest.
FURTHER = 10
GROUPS = ("task", "model", "partition", "method", "attack")


class Verdict(Enum):
    """What came of a round that was run again."""

    EQUAL = "equal to the bit"
    WITHIN = "within the tolerance"
    DIFFERS = "DIFFERS"
    UNCOMPARED = "NOT RUN AGAIN"


@dataclass(frozen=True)
class Compared:
    """One round that was run again; or that was not, for the reason that `detail` tells."""

    record: str
    number: int
    verdict: Verdict
    detail: str


def verify(
    home: Path, rounds: int, seed: int, tolerance: float, data_root: Path | None = None, run: Path | None = None
) -> list[Compared]:
    """Run `rounds` random rounds of each record below `home` again, and compare.

    Parameters
    ----------
    home : Path
        The folder of one name's records.
    rounds : int
        Rounds of each record.
    seed : int
        Chooses the rounds among those that follow a checkpoint at hand (round 0 always is: the initial model).
    tolerance : float
        Largest relative difference of a loss and absolute difference of an accuracy where digests differ, as they do
        between processors.
    data_root : Path, optional
        Where the data sets lie.
    run : Path, optional
        A run's folder whose checkpoints are used too.

    Raises
    ------
    DataError
        If there is no record.

    Notes
    -----
    `home` may be a single record. A run with ``clock=real`` or ``replay`` is repeated by its visits, from the first
    round on; those that had not ended with it are not in the record, so its last rounds may have other digests;
    with ``clock=real`` each round that ends with visits under way has, as the repetition knows their ends. So may the
    former last round of an asynchronous run that was made longer: visits that were to end later had not been sent.
    Without a checkpoint at hand the first rounds are run, and further ones up to the first that has a digest, if that
    is within :data:`FURTHER` rounds: a digest says more than a tolerance.
    """
    records = sorted(path.parent for path in [*home.glob("metrics.jsonl"), *home.glob("*/metrics.jsonl")])
    if not records:
        raise DataError(f"{home}: no records. `ls {home.parent}` lists the names.")
    found = []
    for index, record in enumerate(records):
        draw = stream(seed, "verify", index)
        with tempfile.TemporaryDirectory(prefix="fedcross-verify-") as place:
            found += list(_again(record, rounds, draw, tolerance, data_root, run, Path(place)))
    return found


def _again(
    record: Path, rounds: int, draw: Generator, tolerance: float, data_root: Path | None, run: Path | None, place: Path
) -> Iterator[Compared]:
    from fedcross.server.launch import launch

    told = {line["round"]: line for line in _lines(record / "metrics.jsonl")}
    digests = {line["round"]: line["digest"] for line in _lines(record / DIGESTS, whole=False)}
    settings = [*overrides(record), f"rounds={max(told)}", "logger=none", "checkpoint.every=1"]
    if data_root is not None:
        settings.append(f"data_root={quote(str(data_root.resolve()))}")
    if why := _unlike(record, settings):
        yield Compared(record.name, min(told), Verdict.UNCOMPARED, why)
        return
    repeated = (record / VISITS).exists()
    at_hand = {0} if repeated or _keeps_state(settings) else _checkpoints(record) | _checkpoints(run)
    for start, numbers in _chosen(at_hand, rounds, draw, sorted(told), sorted(digests)):
        folder = place / f"from-{start}"
        if start:
            _prepare(folder, record, run, start, settings)
        more = [f"resume={quote(str(folder))}"] if start else [f"output={quote(str(folder))}"]
        launch([*settings, *more, f"stop_at={max(numbers)}"], folder)
        new = {line["round"]: line for line in _lines(folder / "metrics.jsonl")}
        fresh = {line["round"]: line["digest"] for line in _lines(folder / DIGESTS)}
        for number in numbers:
            yield _compare(
                record.name, number, told[number], new[number], digests.get(number), fresh[number], tolerance
            )


def _unlike(record: Path, settings: list[str]) -> str:
    """Return why a run with `settings` cannot repeat `record`; empty if it can.

    The run changed settings on its way, or the data at hand are others.
    """
    from fedcross.conf.schema import load
    from fedcross.server.identity import digests_of, other_data

    try:
        result = dict(json.loads((record / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        result = {}
    if changes := result.get("changes"):
        names = ", ".join(sorted({str(one["setting"]) for one in changes}))
        rounds = ", ".join(sorted({str(one["after"]) for one in changes}))
        return f"changed on the way, after round {rounds}: {names}. The configuration has the last values alone."
    if not (before := result.get("data")):  # a record of an older version
        return ""
    config = load(settings)
    others = other_data(before, digests_of(config, config.load_data()), "the record")
    return " ".join([*others, "Give --data-root with the record's data."]) if others else ""


def _visits(record: Path, clock: str | None) -> list[str]:
    """Return the settings that repeat the visits of `record`, if its `clock` does not say in which order they ended.

    Raises
    ------
    DataError
        If the record lacks them, as those of older versions do.
    """
    if clock not in ("real", "replay"):
        return []
    if not (record / VISITS).is_file():
        raise DataError(
            f"{record}: a run with clock=real or replay is repeated by its visits, and {VISITS} is not in the record. "
            "Record the run again."
        )
    events = quote(str((record / VISITS).resolve()))
    return ["++clock.name=replay", "++clock.deadline_s=null", f"++clock.events={events}"]


def _checkpoints(folder: Path | None) -> set[int]:
    """Return the rounds of the checkpoints in `folder`, and 0, the initial model."""
    return {0, *(Checkpoints(folder).rounds() if folder is not None else ())}


def _keeps_state(settings: list[str]) -> bool:
    """Return whether clients keep a state between rounds; checkpoints do not hold it."""
    from fedcross.conf.schema import load
    from fedcross.strategies.round.registry import method_class

    config = load(settings)
    keeps: bool = method_class(config.modules["method"]).client_half(config.method).keeps
    return keeps or config.compression.up != "float32"


def _chosen(
    at_hand: set[int], count: int, draw: Generator, known: list[int], sealed: list[int]
) -> list[tuple[int, list[int]]]:
    """Return pairs of a round with a checkpoint (0: the start) and the rounds to run again from it.

    With fewer checkpoints than `count`, several rounds in a row are run from each. `sealed` are the rounds with a
    digest.
    """
    starts = sorted(start for start in at_hand if start < known[-1])
    if starts == [0] and sealed and sealed[0] <= FURTHER:
        count = max(count, sealed[0])
    picked = sorted(int(i) for i in draw.permutation(len(starts))[:count])
    each, rest = divmod(count, len(picked))
    lengths = [each + (i < rest) for i in range(len(picked))]
    return [
        (starts[i], [n for n in range(starts[i] + 1, starts[i] + length + 1) if n in known])
        for i, length in zip(picked, lengths, strict=True)
    ]


def _prepare(folder: Path, record: Path, run: Path | None, start: int, settings: list[str]) -> None:
    """Make `folder` a run that stopped after round `start`."""
    from fedcross.server.launch import record as write_settings

    source = next(one for one in (record, run) if one is not None and start in Checkpoints(one).rounds())
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy2(Checkpoints(source).path(start), Checkpoints(folder).path(start))
    shutil.copyfile(record / "metrics.jsonl", folder / "metrics.jsonl")  # else the run misses its first rounds
    if (loop := Checkpoints(folder).load(start)[0].values.get("_visits")) is not None:  # and as many visits
        (folder / VISITS).write_text('{"round": 0}\n' * int(loop["finished"]), encoding="utf-8")
    write_settings(folder, [one for one in settings if not one.startswith("data_root=")])


def overrides(record: Path) -> list[str]:
    """Return settings, as overrides, that compose the configuration of a record, of an older version too.

    Raises
    ------
    DataError
        If the record's configuration cannot be read.
    """
    from omegaconf import OmegaConf

    from fedcross.conf.schema import load
    from fedcross.server.identity import before_later

    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(record / ".hydra" / "config.yaml"), resolve=False)
        groups = [f"{group}={_named(config[group])}" for group in GROUPS if group in config]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record}: its configuration cannot be read ({error}).") from error
    leaves = dict(_flat({name: value for name, value in config.items() if name not in MACHINES}))
    found = [*groups, *(f"++{name}={_literal(value)}" for name, value in leaves.items() if not _refers(value))]
    found += _visits(record, leaves.get("clock.name"))
    # A version that did not know a setting did not do what its default says today.
    later = {name: value for name, value in before_later(load(found)).items() if name not in leaves}
    return [*found, *(f"++{name}={_literal(value)}" for name, value in later.items())]


def _named(group: Mapping[str, Any]) -> str:
    """Return how a group's settings are asked for: by an import path if they have one, else by name."""
    return str(group.get("path") or group["name"])


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value and prefix.count(".") < 1:
            yield from _flat(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in {f"{group}.name" for group in GROUPS} | {"task.root", "experiment"}:
            yield f"{prefix}{name}", value


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _literal(value: Any) -> str:
    """Return `value` in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_literal(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(one) for one in value) + "]"
    return quote(value) if isinstance(value, str) else repr(value)


def _lines(file: Path, whole: bool = True) -> list[dict[str, Any]]:
    """Return the lines of `file`; a line that cannot be read is an error, or is passed over if not `whole`."""
    if not file.exists():
        return []
    found = []
    for line in filter(None, file.read_bytes().splitlines()):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if whole:
                raise DataError(f"{file}: not lines of JSON ({error}).") from error
    return found


def _compare(
    name: str,
    number: int,
    told: Mapping[str, Any],
    new: Mapping[str, Any],
    digest: str | None,
    fresh: str,
    tolerance: float,
) -> Compared:
    if digest is not None and digest == fresh:
        return Compared(name, number, Verdict.EQUAL, fresh[:12])
    apart = {
        "train loss": _relative(told.get("train_loss"), new.get("train_loss")),
        "test loss": _relative(told.get("test_loss"), new.get("test_loss")),
        "accuracy": _apart(told.get("test_accuracy"), new.get("test_accuracy")),
    }
    shown = {what: value for what, value in apart.items() if value is not None}
    if not shown:
        raise ConfigError(f"{name}: round {number} has neither a loss nor an accuracy to compare.")
    verdict = Verdict.WITHIN if max(shown.values()) <= tolerance else Verdict.DIFFERS
    why = "no digest recorded" if digest is None else f"digest {digest[:12]}, now {fresh[:12]}"
    return Compared(name, number, verdict, f"{why}; " + ", ".join(f"{k} {v:.2g} apart" for k, v in shown.items()))


def _apart(told: float | None, new: float | None) -> float | None:
    return None if told is None or new is None else abs(told - new)


def _relative(told: float | None, new: float | None) -> float | None:
    difference = _apart(told, new)
    return None if difference is None or told is None else difference / max(abs(told), 1e-12)
