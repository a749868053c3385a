"""Reads run folders and committed records (``results/TABLE``) as :class:`~fedcross.analysis.runs.Run` objects.

A run folder holds ``metrics.jsonl``, ``result.json`` and ``.hydra/config.yaml``. A record is a line of
``TABLE/runs.jsonl`` with rows of ``TABLE/curve.csv``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcross.analysis.runs import WIDTH, BadRunError, Run, flatten
from fedcross.core.errors import DataError

RUNS, CURVE, RESULT = "runs.jsonl", "curve.csv", "result.json"


def read_folder(folder: Path) -> Run:
    """Read one run folder.

    Raises
    ------
    BadRunError
        If the folder cannot be used; the message says why.
    """
    settings = _settings(folder)
    curve, note = _curve(folder, settings)
    if curve["accuracy"].isna().all():
        raise BadRunError("no round was evaluated")
    info, planned, done = _result(folder, settings), settings.get("rounds"), int(curve.index[-1])
    lost = sorted(set(range(1, done + 1)) - set(curve.index))
    notes = [note] if note else []
    if not info or (isinstance(planned, int) and done < planned and not info.get("stopped")):
        notes.insert(0, f"unfinished, {done} of {planned} rounds")
    if lost:
        notes.append(f"metrics.jsonl lacks rounds {', '.join(map(str, lost[:10]))}")
    return Run(folder, settings, curve, info, ", ".join(notes))


def _settings(folder: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / ".hydra" / "config.yaml"
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError:
        raise BadRunError("no .hydra/config.yaml") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise BadRunError(f".hydra/config.yaml cannot be read ({type(error).__name__})") from None
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:  # an interpolation that exists only inside a Hydra job
        values = OmegaConf.to_container(config, resolve=False)
    settings = flatten({str(name): value for name, value in values.items()}) if isinstance(values, dict) else {}
    if not settings.get("method.name"):
        raise BadRunError(".hydra/config.yaml has no method.name")
    return settings


def _curve(folder: Path, settings: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """Return the rounds of ``metrics.jsonl`` with cumulative columns, and a note if its last line is incomplete."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise BadRunError("no metrics.jsonl") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRunError(f"metrics.jsonl cannot be read ({type(error).__name__})") from None
    rounds: dict[int, dict[str, Any]] = {}
    note = ""
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            rounds[int(record["round"])] = record  # a resumed run may repeat rounds: the later line counts
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise BadRunError(f"metrics.jsonl is damaged in line {number}") from None
            note = f"line {number} of metrics.jsonl is cut off"
    if not rounds:
        raise BadRunError("metrics.jsonl has no complete round")
    return cumulative([rounds[number] for number in sorted(rounds)], settings), note


def cumulative(lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> pd.DataFrame:
    """Return the curve of a run from its lines of metrics; see :attr:`Run.curve`."""
    raw = pd.DataFrame([_columns(line) for line in lines]).set_index("round").apply(pd.to_numeric, errors="coerce")
    raw = raw.rename(columns={"test_accuracy": "accuracy", "test_loss": "loss"})
    names = ["accuracy", "loss", "bytes_down", "bytes_up", "seconds", "exchanges", "clients", "virtual_seconds"]
    raw = raw.reindex(columns=[*names, *(name for name in raw if name not in names)])
    exchanges = raw["exchanges"].fillna(1)
    first = float(settings.get("train.epochs") or np.nan)
    further = float(settings.get("method.host_epochs") or first)
    raw["bytes"] = (raw["bytes_down"].fillna(0) + raw["bytes_up"].fillna(0)).cumsum()
    raw["seconds"] = raw["seconds"].fillna(0).cumsum()
    raw["epochs"] = ((first + further * (exchanges - 1)) * (exchanges > 0)).cumsum()
    raw["exchanges"], raw["visits"] = exchanges.cumsum(), raw["clients"].fillna(0).cumsum()
    for name in ("virtual_seconds", "clipped", "lightened", "quarantined"):
        raw[name] = raw.get(name, pd.Series(np.nan, raw.index)).cumsum()
    return raw


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one line of metrics; widths and rejected uploads become columns."""
    plain = {name: value for name, value in line.items() if isinstance(value, int | float) or value is None}
    plain |= {f"{WIDTH}{width}": value for width, value in (line.get("width_accuracy") or {}).items()}
    rejected = line.get("rejected")
    return plain | ({"quarantined": rejected.get("quarantined", 0)} if isinstance(rejected, dict) else {})


def _result(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    for name, setting in {"method": "method.name", "task": "task.name", "seed": "seed"}.items():
        told, asked = result.get(name), settings.get(setting)
        if None not in (told, asked) and "${" not in str(asked) and told != asked:
            raise BadRunError(f"result.json is of another run than .hydra/config.yaml: {name} {told!r}, not {asked!r}")
    return dict(result)


def read_table(table: Path) -> list[Run]:
    """Read the records of one table: ``runs.jsonl`` and ``curve.csv``.

    The first line of ``runs.jsonl`` has the settings that all runs share, each further line those of one run.

    Raises
    ------
    DataError
        If one of the files cannot be read.
    """
    try:
        first, *lines = [json.loads(line) for line in (table / RUNS).read_text(encoding="utf-8").splitlines()]
        curves = pd.read_csv(table / CURVE).set_index("round")
        parts = {name: part.drop(columns="run").dropna(axis=1, how="all") for name, part in curves.groupby("run")}
        return [
            Run(
                table / line["run"],
                flatten({**first["experiment"], **line["settings"], "seed": line["seed"]}),
                parts[line["run"]],
                line,
            )
            for line in lines
        ]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{table}: its records cannot be read ({error}).") from error


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return every run folder at or below `paths`, sorted."""
    found: set[Path] = set()
    for path in paths:
        for pattern in ("metrics.jsonl", RESULT, ".hydra/config.yaml"):
            found |= {hit.parents[len(Path(pattern).parts) - 1].resolve() for hit in path.rglob(pattern)}
    return sorted(found)


def load_runs(
    paths: Sequence[str | Path], unfinished: bool = False, until: int | None = None, every: int | None = None
) -> tuple[list[Run], list[str]]:
    """Read all runs and records at or below `paths`; ``TABLE/NAME`` is one record.

    `unfinished` keeps runs that have not reached their last round; `until` and `every` as in :class:`Run`. Returns the
    runs, and a sentence about each folder that was left out or is incomplete.

    Raises
    ------
    DataError
        If a path is no folder, or nothing usable is found.
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
    found: list[Path | Run] = []
    for path in paths:
        if (path.parent / RUNS).is_file() and not path.is_file():
            found += [run for run in read_table(path.parent) if run.path == path]
        elif path.is_dir():
            tables = sorted(file.parent for file in path.rglob(RUNS))
            found += [run for table in tables for run in read_table(table)]
            found += run_folders([path])
        elif not path.is_file() or len(paths) == 1:
            raise DataError(f"{path}: no such folder. Give the output folder of a run or of a sweep.")
    return found
