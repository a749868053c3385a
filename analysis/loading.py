"""Reading run folders.

A run folder holds ``metrics.jsonl`` (one object per round), ``result.json`` (written when the run ends) and
``.hydra/config.yaml``; of ``visits.jsonl`` the digest counts where it decides the result (``clock=real`` or
``replay``). Nothing else is read. A folder that cannot be used is no error; a note gives the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.analysis.agreement import missing, result_fault
from fedcross.analysis.groups import CHANGES, DATA, VISITS
from fedcross.analysis.runs import WIDTHS, Curve, Run
from fedcross.conf.later import LATER
from fedcross.core.errors import DataError
from fedcross.core.overrides import shown


class BadRunError(Exception):
    """A run folder that cannot be used; the message is the reason. Not raised outside this module."""


@dataclass(frozen=True)
class Loaded:
    """Runs that can be used, and a note about each folder that was left out or is incomplete."""

    runs: list[Run]
    notes: list[str]


EARLIER: dict[str, Any] = {"train.clip": None, "defence.enabled": False, "attack.name": "none", "clock.name": "none"}
"""Settings that the oldest records lack, with the value that stands for their behaviour; more are in conf/later.py."""

SWITCHES = {
    "defence": ("defence.enabled", False),
    "attack": ("attack.name", "none"),
    "clock": ("clock.name", "none"),
}
"""Groups of settings without effect while their switch is off."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = tuple(value) if isinstance(value, list) else value
    return flat


def _read_settings(folder: Path) -> dict[str, Any]:
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
    settings = flatten({str(k): v for k, v in values.items()}) if isinstance(values, dict) else {}
    if not settings.get("method.name"):
        raise BadRunError(".hydra/config.yaml has no method.name")
    return settled(settings)


def settled(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` with the settings that older runs lack, and without groups that are switched off.

    So a record from before a setting existed and a run with that setting off count as one configuration.
    """
    settings = EARLIER | flatten(LATER) | settings
    if settings.get("method.mode") == "cross":  # then it has no effect, and its default has changed
        settings.pop("method.propeller_weighting", None)
    idle = [group for group, (name, off) in SWITCHES.items() if settings[name] == off]
    idle += ["devices"] if settings["clock.name"] != "virtual" and not settings.get("method.widths") else []
    return {k: v for k, v in settings.items() if k in EARLIER or k.split(".")[0] not in idle}


def _read_metrics(folder: Path) -> tuple[dict[str, Curve], str]:
    """Return the columns of ``metrics.jsonl`` and a note if its last line is incomplete."""
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
            number_of_round = int(record["round"])  # a resumed run may repeat rounds: the later line counts
            rounds[number_of_round] = record | _by_width(record) | _quarantined(record)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise BadRunError(f"metrics.jsonl is damaged in line {number}") from None
            note = f"line {number} of metrics.jsonl is cut off"
    if not rounds:
        raise BadRunError("metrics.jsonl has no complete round")
    ordered = [rounds[number] for number in sorted(rounds)]
    names = dict.fromkeys(key for record in ordered for key in record)
    return {name: np.array([_number(record.get(name)) for record in ordered]) for name in names}, note


def _by_width(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field for the accuracy of each size of the model, where a round has them."""
    found = record.get("width_accuracy")
    return {f"{WIDTHS}{size}": value for size, value in found.items()} if isinstance(found, dict) else {}


def _quarantined(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field for the uploads that the defence rejected; one of reasons is no column."""
    found = record.get("rejected")
    return {"quarantined": found.get("quarantined", 0)} if isinstance(found, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _read_result(folder: Path) -> dict[str, Any]:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _read_visits(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting that stands for the visits, where the run's result depends on them and they are there."""
    if settings["clock.name"] not in ("real", "replay"):
        return {}
    try:
        return {VISITS: hashlib.sha256((folder / "visits.jsonl").read_bytes()).hexdigest()[:8]}
    except OSError:
        return {}


def _read_data(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting that stands for the data: the first digits of the digests in `result`, if it has them."""
    data = result.get("data")
    return {DATA: "-".join(str(digest)[:6] for digest in data.values())} if isinstance(data, dict) and data else {}


def _read_changes(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting that stands for what a run changed on its way, where its `result` says so."""
    text = changed(result)
    return {CHANGES: text} if text else {}


def changed(result: Mapping[str, Any]) -> str:
    """Return which settings a run changed when it was continued, and when: ``clients_per_round 4 to round 5``."""
    changes = result.get("changes")
    listed = changes if isinstance(changes, list) else []
    told = [one for one in listed if isinstance(one, dict) and {"after", "setting", "from", "to"} <= one.keys()]
    return "; ".join(f"{one['setting']} {one['from']} to round {one['after']}, then {one['to']}" for one in told)


def load_run(folder: Path, until: int | None = None, every: int | None = None) -> Run:
    """Read one run folder, up to round `until`, with the evaluations of every `every`-th round alone.

    Raises
    ------
    BadRunError
        If the folder cannot be used; the message says why.
    """
    settings = _read_settings(folder)
    columns, note = _read_metrics(folder)
    if np.isnan(columns.get("test_accuracy", np.array([np.nan]))).all():
        raise BadRunError("no round was evaluated")
    settings |= _read_visits(folder, settings)
    result = _read_result(folder)
    if fault := result_fault(result, settings, columns, folder):
        raise BadRunError(fault)
    settings |= _read_data(result) | _read_changes(result)
    done, planned = int(columns["round"][-1]), settings.get("rounds")
    if not result:
        of = f" of {planned}" if planned else ""
        unended = f"unfinished, {done}{of} rounds" + (" but no result.json" if done == planned else "")
        reason = "result.json is damaged" if (folder / "result.json").exists() else unended
        note = f"{reason}, {note}" if note else reason
    elif isinstance(planned, int) and done < planned and result.get("rounds") != planned:  # else lines are lost
        note = f"unfinished, {done} of {planned} rounds"
    run = Run(folder, settings, columns, result, note)
    if until is not None:
        run = run.until(until)
    ended = planned if isinstance(planned, int) and result.get("rounds") == planned else 0
    if gap := missing(run.columns, ended if until is None else min(ended, until)):
        run = replace(run, note=f"{run.note}, {gap}" if run.note else gap)
    if every is not None:
        try:
            run = run.every(every)
        except ValueError as error:
            raise BadRunError(str(error)) from None
    if not run.accuracy.size:
        raise BadRunError(
            "no evaluation"
            + (f" in a round that {every} divides" if every is not None else "")
            + (f" up to round {until}" if until is not None else "")
        )
    return run


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return every run folder at or below `paths`, sorted and without duplicates; files beside folders do not count."""
    found: set[Path] = set()
    given = [Path(path) for path in paths]
    for path in [one for one in given if not one.is_file()] or given:
        if not path.is_dir():
            raise DataError(f"{path}: no such folder. Give the output folder of a run or of a sweep.")
        for pattern in ("metrics.jsonl", "result.json", ".hydra/config.yaml"):
            depth = len(Path(pattern).parts)
            found |= {hit.parents[depth - 1].resolve() for hit in path.rglob(pattern)}
    return sorted(found)


def _stopped(run: Run) -> bool:
    """Return whether `run`, which is not finished, can be continued."""
    ended = bool(run.result) and "unfinished" not in run.note
    return not ended and any((run.path / "checkpoints").glob("round-*.safetensors"))


def load_runs(
    paths: Sequence[str | Path], unfinished: bool = False, until: int | None = None, every: int | None = None
) -> Loaded:
    """Read all runs at or below `paths`.

    Parameters
    ----------
    paths : sequence of path
        Folders, searched recursively.
    unfinished : bool
        Keep runs that have not reached their last round, with a note.
    until : int, optional
        Use only rounds up to this one, so that runs of different lengths are compared at equal rounds. A run that has
        reached this round counts as finished.
    every : int, optional
        Use only the evaluations of every such round, so that runs evaluated at other intervals are compared alike.

    Raises
    ------
    DataError
        If a path is not a folder, or nothing usable is found in any of them.
    """
    runs: list[Run] = []
    notes: list[str] = []
    waiting: list[Run] = []
    for folder in run_folders(paths):
        try:
            run = load_run(folder, until, every)
        except BadRunError as error:
            notes.append(f"left out {folder}: {error}")
            continue
        if run.finished or unfinished:
            runs.append(run)
            if CHANGES in run.settings:
                notes.append(f"{folder}: its settings changed on the way: {run.settings[CHANGES]}")
        if not run.finished:
            waiting += [] if unfinished else [run]
            notes.append(f"{'counted as it is' if unfinished else 'left out'} {folder}: {run.note}")
    if not runs:
        where = ", ".join(map(str, paths))
        detail = "".join(f"\n  {note}" for note in notes)
        cures = []
        if stopped := [run.path for run in waiting if _stopped(run)]:
            cures.append(
                f"To finish one: fedcross resume={shown(stopped[0])}, with rounds=N to end it at round N, one that it "
                "has reached or a later one."
            )
        if waiting:
            cures.append("fedcross report --unfinished counts all as they are.")
        cure = " ".join(cures) or "Give a folder that `fedcross` has written to."
        raise DataError(f"{where}: no finished run. {cure}{detail}")
    return Loaded(runs, notes)
