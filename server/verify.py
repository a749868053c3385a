"""``fedcross record verify``: runs rounds of a record again and compares them with what the record says."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.random import Generator

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.overrides import quote
from fedcross.core.randomness import stream
from fedcross.server.checkpoint import DIGESTS, Checkpoints
from fedcross.server.visit_ledger import NAME as VISITS

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

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
#: Largest relative difference between a number and the six digits of it that a record has.
ROUNDED = 1e-5
#: Largest relative difference of a loss and absolute difference of an accuracy of one model on two processors.
ALIKE = 1e-3


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
        between processors. Where digests are equal, so are losses and accuracies, to the digits of the record; on
        another processor than the record's up to :data:`ALIKE`, or the tolerance if it is smaller.
    data_root : Path, optional
        Where the data sets lie.
    run : Path, optional
        The folder of the run of a record, whose checkpoints are used too.

    Raises
    ------
    DataError
        If there is no record, or `run` has no checkpoint or is the run of none.

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
    own = records if run is None else _records_of(run, records)
    found = []
    for index, record in enumerate(records):
        draw = stream(seed, "verify", index)
        with tempfile.TemporaryDirectory(prefix="fedcross-verify-") as place:
            its = run if record in own else None
            found += list(_again(record, rounds, draw, tolerance, data_root, its, Path(place)))
    return found


def _records_of(run: Path, records: list[Path]) -> list[Path]:
    """Return those of `records` that have the losses and accuracies of the run in the folder `run`.

    Raises
    ------
    DataError
        If the folder has no checkpoint, or is the run of none of them.
    """
    if not Checkpoints(run).rounds():
        raise DataError(f"--run {run}: no checkpoint in such a folder. Give that of the recorded run, or leave it out.")
    had = {line["round"]: line for line in _lines(run / "metrics.jsonl", whole=False)}

    def same(record: Path) -> bool:
        told = {line["round"]: line for line in _lines(record / "metrics.jsonl")}
        apart = [one for number in told.keys() & had.keys() for one in _differences(told[number], had[number])]
        return bool(apart) and all(one.size <= ROUNDED for one in apart)

    if not (own := [record for record in records if same(record)]):
        raise DataError(
            f"--run {run}: another run, for its losses and accuracies are not those of "
            f"{' or '.join(record.name for record in records[:3])}{' or ...' if len(records) > 3 else ''}. Give the "
            "folder of the recorded run, or leave it out."
        )
    return own


def _again(
    record: Path, rounds: int, draw: Generator, tolerance: float, data_root: Path | None, run: Path | None, place: Path
) -> Iterator[Compared]:
    from fedcross.conf.schema import load
    from fedcross.server.app import untold
    from fedcross.server.launch import launch

    told = {line["round"]: line for line in _lines(record / "metrics.jsonl")}
    digests = {line["round"]: line["digest"] for line in _lines(record / DIGESTS, whole=False)}
    settings = [*overrides(record), f"rounds={max(told)}", "logger=none", "checkpoint.every=1"]
    if data_root is not None:
        settings.append(f"data_root={quote(str(data_root.resolve()))}")
    config = load(settings)
    if why := _unlike(record, config):
        yield Compared(record.name, min(told), Verdict.UNCOMPARED, why)
        return
    rules = _Rules(tolerance, _other_here(record, config), _repeatable(config))
    repeated = (record / VISITS).exists()
    at_hand = {0} if repeated or _keeps_state(config) else _checkpoints(record) | _checkpoints(run)
    for start, numbers in _chosen(at_hand, rounds, draw, sorted(told), sorted(digests)):
        folder = place / f"from-{start}"
        if start:
            _prepare(folder, record, run, start, settings)
        more = [f"resume={quote(str(folder))}"] if start else [f"output={quote(str(folder))}"]
        with untold():  # the folder is thrown away
            launch([*settings, *more, f"stop_at={max(numbers)}"], folder)
        new = {line["round"]: line for line in _lines(folder / "metrics.jsonl")}
        fresh = {line["round"]: line["digest"] for line in _lines(folder / DIGESTS)}
        for number in numbers:
            apart = _differences(told[number], new[number])
            yield _compare(record.name, number, apart, digests.get(number), fresh[number], rules)


def _unlike(record: Path, config: RunConfig) -> str:
    """Return why a run of `config` cannot repeat `record`; empty if it can.

    The run changed settings on its way, or the data at hand are others.
    """
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


def _other_here(record: Path, config: RunConfig) -> list[str]:
    """Return which of machine, versions, engine and code are not those of `record` if `config` runs here.

    What the record lacks, as older ones do, or what nobody can tell (code with changes) counts as another.
    """
    from fedcross.client.device import gpu_name, pick_device
    from fedcross.core import machine
    from fedcross.server.accounting import commit, versions

    try:
        told = dict(json.loads((record / "result.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        told = {}
    device, code = pick_device(config.device), commit()
    here = {
        "machine": (machine.described(gpu_name(device)), str(device)),
        "versions": versions(),
        "engine": config.names["engine"],
        "code": None if code is None or code.endswith("-dirty") else code,
    }
    there = {
        "machine": (told.get("machine"), told.get("device")),
        "versions": told.get("versions"),
        "engine": told.get("engine"),
        "code": told.get("commit"),
    }
    return [name for name, value in here.items() if value is None or value != there[name]]


def _repeatable(config: RunConfig) -> bool:
    """Return whether the same machine and code give the same digest: not a GPU's, nor an asynchronous run's.

    The digest of an asynchronous run depends on the visits that are under way, :func:`verify` says when.
    """
    from fedcross.client.device import pick_device
    from fedcross.strategies.round.registry import method_class

    exact = pick_device(config.device).type == "cpu" or config.train.deterministic
    return exact and not method_class(config.modules["method"]).asynchronous


def _keeps_state(config: RunConfig) -> bool:
    """Return whether clients keep a state between rounds; checkpoints do not hold it."""
    from fedcross.strategies.round.registry import method_class

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


@dataclass(frozen=True)
class _Rules:
    """What decides on a round's differences: the tolerance, what is another here, whether a digest comes again."""

    tolerance: float
    other: list[str]
    repeatable: bool

    @property
    def alike(self) -> float:
        """The largest difference of a measure of two models that are the same."""
        return max(min(ALIKE, self.tolerance), ROUNDED) if self.other else ROUNDED

    def why(self) -> str:
        """Return why a digest may be another one; empty if nothing explains it."""
        if self.other:
            return f"other here: {', '.join(self.other)}"
        return "" if self.repeatable else "GPUs and asynchronous runs may differ"


@dataclass(frozen=True)
class _Difference:
    """What a measure of a round is in the record and now, and how far apart."""

    measure: str
    told: float
    new: float
    relative: bool

    @property
    def size(self) -> float:
        """The relative or the absolute difference."""
        return abs(self.told - self.new) / (max(abs(self.told), 1e-12) if self.relative else 1.0)

    def __str__(self) -> str:
        return f"{self.measure} {self.told:.6g}, now {self.new:.6g}"


def _differences(told: Mapping[str, Any], new: Mapping[str, Any]) -> list[_Difference]:
    """Return the differences of the losses and accuracies that both lines of a round have."""
    names = {"train loss": "train_loss", "test loss": "test_loss", "accuracy": "test_accuracy"}
    pairs = {what: (told.get(name), new.get(name)) for what, name in names.items()}
    widths, now = told.get("width_accuracy") or {}, new.get("width_accuracy") or {}
    pairs |= {f"accuracy at width {width}": (value, now.get(width)) for width, value in widths.items()}
    return [
        _Difference(what, float(before), float(after), what.endswith("loss"))
        for what, (before, after) in pairs.items()
        if before is not None and after is not None
    ]


def _compare(
    name: str, number: int, apart: list[_Difference], digest: str | None, fresh: str, rules: _Rules
) -> Compared:
    same = digest == fresh
    if not same and not apart:
        raise ConfigError(f"{name}: round {number} has neither a loss nor an accuracy to compare.")
    limit = rules.alike if same else rules.tolerance
    wrong = ", ".join(str(one) for one in apart if one.size > limit)
    if same:
        detail = f"{fresh[:12]}, the same digest; in the record {wrong}" if wrong else fresh[:12]
        return Compared(name, number, Verdict.DIFFERS if wrong else Verdict.EQUAL, detail)
    sizes = ", ".join(f"{one.measure} {one.size:.2g} apart" for one in apart)
    if digest is None:
        told, unexplained = "no digest recorded", False
    else:
        told, unexplained = f"digest {digest[:12]}, now {fresh[:12]}", not rules.why()
        told += f" ({rules.why() or 'on the same machine, with the same versions, engine and code'})"
    verdict = Verdict.DIFFERS if wrong or unexplained else Verdict.WITHIN
    return Compared(name, number, verdict, f"{told}; {sizes}" + (f"; in the record {wrong}" if wrong else ""))
