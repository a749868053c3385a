"""``fedcross record``: writes finished runs into ``results/TABLE``, as ``runs.jsonl`` and ``curve.csv``."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedcross.analysis.frames import CURVE, RUNS, load_runs, read_table
from fedcross.analysis.labels import identity, in_groups
from fedcross.analysis.runs import WIDTH, Run
from fedcross.core.errors import ConfigError, StorageError

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
DIGITS = 6
"""Significant digits of the numbers in a record."""
OMITTED = (
    "output", "resume", "data_root", "task.root", "stop_at", "experiment", "hydra", "logger", "log", "serve",
    "checkpoint", "snapshots",
)  # fmt: skip
"""Settings of one machine or of one moment; a record lacks them."""
KEPT = (
    "accuracy", "loss", "bytes", "seconds", "virtual_seconds", "exchanges", "epochs", "visits", "clipped", "lightened",
    "quarantined",
)  # fmt: skip
"""Columns of a record's curve, besides the accuracy of each width; those without a number are left out."""
FACTS = (
    "commit", "machine", "device", "engine", "versions", "rounds", "final_accuracy", "best_accuracy",
    "smoothed_accuracy", "last_ten_accuracy", "class_accuracy", "bytes_total", "seconds_total", "data", "changes",
    "privacy",
)  # fmt: skip
"""What a record takes from ``result.json``."""


def record(folders: Sequence[Path], name: str, results: Path) -> list[str]:
    """Add all finished runs below `folders` to the table `name`; return a sentence about each run left out.

    A new record replaces one of the same configuration and seed.

    Raises
    ------
    ConfigError
        If `name` is not a plain name.
    DataError
        If there is no finished run.
    StorageError
        If `results` cannot be written.
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
    settings = {name: _neutral(value) for name, value in run.settings.items() if not in_groups(name, OMITTED)}
    facts = {name: _short(run.info[name]) for name in FACTS if run.info.get(name) is not None}
    digests = _digests(run.path / "digests.jsonl")
    mark = hashlib.sha256(json.dumps([sorted(settings.items()), facts.get("data")], default=str).encode()).hexdigest()
    name = f"{settings['method.name']}-{settings.get('task.name')}-seed{run.seed}-{mark[:8]}"
    info = {"run": name, **facts, **({"digests": digests} if digests else {})}
    return Run(run.path.parent / name, settings, run.curve, info)


def _digests(file: Path) -> dict[str, str]:
    """Return the digests of the model after the first and the last checkpoint: round -> SHA-256."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {str(line["round"]): line["digest"] for line in (lines[:1] + lines[-1:])}


def _neutral(value: Any) -> Any:
    """Return a setting; of an absolute path the last part."""
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value  # noqa: PTH117 - a string


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write_table(table: Path, runs: Sequence[Run]) -> None:
    """Write ``runs.jsonl`` and ``curve.csv`` of the records `runs` into the folder `table`."""
    first = {name: value for name, value in runs[0].settings.items() if name != "seed"}
    shared = {n: v for n, v in first.items() if all(n in r.settings and r.settings[n] == v for r in runs)}
    lines: list[dict[str, Any]] = [{"experiment": shared}]
    parts = []
    for run in sorted(runs, key=lambda one: str(one.info["run"])):
        own = {name: value for name, value in run.settings.items() if name not in shared and name != "seed"}
        facts = {name: value for name, value in run.info.items() if name not in ("run", "settings", "seed")}
        lines.append({"run": run.info["run"], "settings": own, "seed": run.seed, **facts})
        rows = run.curve[run.curve["accuracy"].notna()]
        parts.append(rows.reset_index().assign(run=run.info["run"]))
    table.mkdir(parents=True, exist_ok=True)
    (table / RUNS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    curve = pd.concat(parts)
    columns = [n for n in (*KEPT, *sorted(n for n in curve if n.startswith(WIDTH))) if n in curve]
    columns = [name for name in columns if curve[name].fillna(0).any()]
    curve[columns] = curve[columns].map(_text)
    curve[["run", "round", *columns]].to_csv(table / CURVE, index=False, lineterminator="\n")


def _text(value: float) -> str:
    """Return a number with :data:`DIGITS` digits; from 1,000 on, with up to three behind the point."""
    text = f"{value:.{DIGITS}g}" if abs(value) < 1000 else f"{value:.3f}".rstrip("0").rstrip(".")
    return "" if pd.isna(value) else text
