"""Reads run folders and records (``results/TABLE``) as :class:`~fedcross.analysis.runs.Run`, and writes records.

A run folder holds ``metrics.jsonl``, ``result.json`` and ``.hydra/config.yaml``. A record is a line of
``TABLE/runs.jsonl`` with rows of ``TABLE/curve.csv``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedcross.analysis.runs import WIDTH, BadRunError, Run, flatten, identity, in_groups
from fedcross.core.errors import ConfigError, DataError, StorageError

RUNS, CURVE, RESULT = "runs.jsonl", "curve.csv", "result.json"
METRICS, CONFIG = "metrics.jsonl", ".hydra/config.yaml"
COLUMNS = ["accuracy", "loss", "bytes_down", "bytes_up", "seconds", "exchanges", "clients", "virtual_seconds"]
"""Columns that every curve has."""
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
DIGITS = 6
"""Significant digits of the numbers in a record."""
OMITTED = (
    "output", "resume", "data_root", "task.root", "stop_at", "experiment", "hydra", "logger", "log", "serve",
    "checkpoint", "snapshots",
)  # fmt: skip
"""Settings of one machine or of one moment; a record lacks them."""
KEPT = (
    "accuracy", "round_accuracy", "validation_accuracy", "loss", "bytes", "seconds", "virtual_seconds", "exchanges",
    "epochs", "visits", "clipped", "lightened", "quarantined",
)  # fmt: skip
"""Columns of a record's curve, besides the accuracy of each width; those without a number are left out."""
FACTS = (
    "commit", "machine", "device", "engine", "versions", "rounds", "final_accuracy", "best_accuracy",
    "smoothed_accuracy", "last_ten_accuracy", "class_accuracy", "bytes_total", "seconds_total", "data", "changes",
    "privacy",
)  # fmt: skip
"""What a record takes from ``result.json``."""


def read_folder(folder: Path) -> Run:
    """Read one run folder; a BadRunError says why it cannot be used."""
    settings = _settings(folder)
    curve, note = _curve(folder, settings)
    if curve["accuracy"].isna().all():
        raise BadRunError("no round was evaluated")
    try:
        info = dict(json.loads(_text(folder, RESULT)))
    except (BadRunError, ValueError):  # it has not ended
        info = {}
    planned, done, notes = settings.get("rounds"), int(curve.index[-1]), [note] if note else []
    if not info or (isinstance(planned, int) and done < planned and not info.get("stopped")):
        notes.insert(0, f"unfinished, {done} of {planned} rounds")
    if lost := sorted(set(range(1, done + 1)) - set(curve.index)):
        notes.append(f"metrics.jsonl lacks rounds {', '.join(map(str, lost[:10]))}")
    return Run(folder, settings, curve, info, ", ".join(notes))


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadRunError(f"no {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRunError(f"{name} cannot be read ({type(error).__name__})") from None


def _settings(folder: Path) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.create(_text(folder, CONFIG)), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise BadRunError(f"{CONFIG} cannot be read ({type(error).__name__})") from None
    settings = flatten({str(name): value for name, value in values.items()}) if isinstance(values, dict) else {}
    if not settings.get("method.name"):
        raise BadRunError(f"{CONFIG} has no method.name")
    return settings


def _curve(folder: Path, settings: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """Return the rounds of ``metrics.jsonl`` with cumulative columns, and a note if its last line is incomplete."""
    lines, note = _text(folder, METRICS).splitlines(), ""
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            rounds[int(record["round"])] = record  # a resumed run may repeat rounds: the later line counts
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise BadRunError(f"{METRICS} is damaged in line {number}") from None
            note = f"line {number} of {METRICS} is cut off"
    if not rounds:
        raise BadRunError(f"{METRICS} has no complete round")
    return cumulative([rounds[number] for number in sorted(rounds)], settings), note


def cumulative(lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> pd.DataFrame:
    """Return the curve of a run from its lines of metrics; see :attr:`Run.curve`."""
    raw = pd.DataFrame([_columns(line) for line in lines]).set_index("round").apply(pd.to_numeric, errors="coerce")
    raw = raw.rename(columns={"test_accuracy": "accuracy", "test_loss": "loss"})
    raw = raw.reindex(columns=[*COLUMNS, *raw.columns.difference(COLUMNS, sort=False)])
    exchanges, zeros = raw["exchanges"].fillna(1), raw.fillna(0)
    first = float(settings.get("train.epochs") or np.nan)
    further = float(settings.get("method.host_epochs") or first)
    raw["bytes"] = (zeros["bytes_down"] + zeros["bytes_up"]).cumsum()
    raw["seconds"], raw["visits"] = zeros["seconds"].cumsum(), zeros["clients"].cumsum()
    raw["epochs"] = ((first + further * (exchanges - 1)) * (exchanges > 0)).cumsum()
    raw["exchanges"] = exchanges.cumsum()
    summed = ["virtual_seconds", "clipped", "lightened", "quarantined"]
    raw[summed] = raw.reindex(columns=summed).cumsum()
    return raw


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one line of metrics; widths and rejected uploads become columns."""
    plain = {name: value for name, value in line.items() if isinstance(value, int | float) or value is None}
    plain |= {f"{WIDTH}{width}": value for width, value in (line.get("width_accuracy") or {}).items()}
    rejected = line.get("rejected")
    return plain | ({"quarantined": rejected.get("quarantined", 0)} if isinstance(rejected, dict) else {})


def read_table(table: Path) -> list[Run]:
    """Read the records of one table: ``runs.jsonl`` and ``curve.csv``; a DataError if one cannot be read.

    The first line of ``runs.jsonl`` has the settings that all runs share, each further line those of one run.
    """
    try:
        first, *lines = [json.loads(line) for line in (table / RUNS).read_text(encoding="utf-8").splitlines()]
        curves = pd.read_csv(table / CURVE).set_index("round")
        parts = {name: part.drop(columns="run").dropna(axis=1, how="all") for name, part in curves.groupby("run")}
        shared = first["experiment"]
        settings = [flatten({**shared, **line["settings"], "seed": line["seed"]}) for line in lines]
        return [Run(table / line["run"], s, parts[line["run"]], line) for line, s in zip(lines, settings, strict=True)]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{table}: its records cannot be read ({error}).") from error


def load_runs(
    paths: Sequence[str | Path], unfinished: bool = False, until: int | None = None, every: int | None = None
) -> tuple[list[Run], list[str]]:
    """Read all runs and records at or below `paths`; ``TABLE/NAME`` is one record.

    `unfinished` keeps runs that have not reached their last round; `until` and `every` as in :class:`Run`. Returns the
    runs, and a sentence about each folder that was left out or is incomplete. A DataError says that a path is no
    folder, or that nothing usable is there.
    """
    runs: list[Run] = []
    notes: list[str] = []
    for found in _candidates([Path(path) for path in paths]):
        path = found if isinstance(found, Path) else found.path
        try:
            run = read_folder(found) if isinstance(found, Path) else found
            run = run if until is None else run.until(until)
            run = run if every is None else run.every(every)
            if run.accuracy.empty:
                raise BadRunError("no evaluation in the chosen rounds")
        except BadRunError as error:
            notes.append(f"left out {path}: {error}")
            continue
        if not run.note or unfinished:
            runs.append(run)
        if run.note:
            notes.append(f"{'counted as it is' if unfinished else 'left out'} {path}: {run.note}")
    if not runs:
        detail = "".join(f"\n  {note}" for note in notes)
        cure = "--unfinished counts unfinished runs; fedcross resume=FOLDER finishes one."
        raise DataError(f"{', '.join(map(str, paths))}: no finished run. {cure}{detail}")
    return runs, notes


def _candidates(paths: Sequence[Path]) -> list[Path | Run]:
    """Return the records, and the sorted run folders, at or below each of `paths`."""
    found: list[Path | Run] = []
    for path in paths:
        if (path.parent / RUNS).is_file() and not path.is_file():
            found += [run for run in read_table(path.parent) if run.path == path]
        elif path.is_dir():
            found += [run for file in sorted(path.rglob(RUNS)) for run in read_table(file.parent)]
            names = (METRICS, RESULT, CONFIG)
            found += sorted({hit.parents[name.count("/")].resolve() for name in names for hit in path.rglob(name)})
        elif not path.is_file() or len(paths) == 1:
            raise DataError(f"{path}: no such folder. Give the output folder of a run or of a sweep.")
    return found


def record(folders: Sequence[Path], name: str, results: Path) -> list[str]:
    """Add all finished runs below `folders` to the table `name`; return a sentence about each run left out.

    A new record replaces one of the same configuration and seed. A ConfigError says that `name` is not a plain name, a
    DataError that there is no finished run, a StorageError that `results` cannot be written.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: small letters, digits, and _.- only. Choose another name.")
    runs, notes = load_runs(folders)
    table = results / name
    before = read_table(table) if (table / RUNS).exists() else []
    merged = {_same(run): run for run in [*before, *map(recorded, runs)]}
    try:
        write_table(table, list(merged.values()))
    except OSError as error:
        raise StorageError(f"{table}: cannot be written ({error}). Choose another folder with --results.") from error
    return notes


def _same(run: Run) -> object:
    return identity(run), run.seed, json.dumps(run.info.get("data")), json.dumps(run.info.get("changes"))


def recorded(run: Run) -> Run:
    """Return `run`, from its folder, as its record will have it: small, and without paths of this machine."""
    settings = {name: value for name, value in run.settings.items() if not in_groups(name, OMITTED)}
    paths = {name: Path(value) for name, value in settings.items() if isinstance(value, str)}
    settings |= {name: path.name for name, path in paths.items() if path.is_absolute()}
    facts = {name: _rounded(run.info[name]) for name in FACTS if run.info.get(name) is not None}
    if (file := run.path / "digests.jsonl").exists():  # of the models after the first and the last checkpoint
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        facts["digests"] = {str(line["round"]): line["digest"] for line in (lines[:1] + lines[-1:])}
    mark = hashlib.sha256(json.dumps([sorted(settings.items()), facts.get("data")], default=str).encode()).hexdigest()
    name = f"{settings['method.name']}-{settings.get('task.name')}-seed{run.seed}-{mark[:8]}"
    return Run(run.path.parent / name, settings, run.curve, {"run": name, **facts})


def _rounded(value: Any) -> Any:
    """Return `value` with its numbers, also inside lists and mappings, at :data:`DIGITS` digits."""
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write_table(table: Path, runs: Sequence[Run]) -> None:
    """Write ``runs.jsonl`` and ``curve.csv`` of the records `runs` into the folder `table`."""
    first = {name: value for name, value in runs[0].settings.items() if name != "seed"}
    shared = {n: v for n, v in first.items() if all(n in r.settings and r.settings[n] == v for r in runs)}
    lines: list[dict[str, Any]] = [{"experiment": shared}]
    parts = []
    for run in sorted(runs, key=lambda one: str(one.info["run"])):
        own = {name: value for name, value in run.settings.items() if name not in shared and name != "seed"}
        facts = {"settings": own, "seed": run.seed}
        lines.append({"run": run.info["run"], **facts, **run.info, **facts})
        parts.append(run.curve[run.curve["accuracy"].notna()].reset_index().assign(run=run.info["run"]))
    table.mkdir(parents=True, exist_ok=True)
    (table / RUNS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    curve = pd.concat(parts)
    columns = [n for n in (*KEPT, *sorted(n for n in curve if n.startswith(WIDTH))) if n in curve]
    columns = [name for name in columns if curve[name].fillna(0).any()]
    curve[columns] = curve[columns].map(_digits)
    curve[["run", "round", *columns]].to_csv(table / CURVE, index=False, lineterminator="\n")


def _digits(value: float) -> str:
    """Return a number with :data:`DIGITS` digits; from 1,000 on, with up to three behind the point."""
    text = f"{value:.{DIGITS}g}" if abs(value) < 1000 else f"{value:.3f}".rstrip("0").rstrip(".")
    return "" if pd.isna(value) else text
