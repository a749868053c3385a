"""The record of a run: a line of ``metrics.jsonl`` per round, ``result.json`` at the end, and when a run ends early."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log

from fedcross.conf.schema import StopSettings
from fedcross.core.errors import ConfigError, FederationError, counted, nearest
from fedcross.core.files import dumps
from fedcross.engines.flower_private import installed
from fedcross.server.observers import Observer
from fedcross.server.run_folder import Lines
from fedcross.tasks.accuracies import WINDOW, smoothed
from fedcross.tasks.scoring import Score

#: Reasons for which replies are rejected where the learning rate is too large.
DIVERGED = {"non_finite", "bad_metrics"}
#: Columns of the traffic, and of clients' accuracies; ``result.json`` repeats their last values.
BYTES = ("bytes_down", "bytes_up")
SPREADS = (
    *("client_accuracy_mean", "client_accuracy_worst_tenth", "client_accuracy_std"),
    *("local_accuracy", "local_accuracy_worst_tenth", "local_accuracy_std"),
)


class Metrics(Observer):
    """Writes ``metrics.jsonl``, on disk (fsync) line by line; `lines` are those in the file.

    Those of an earlier process stay up to the round `keep_until`; a warning names missing rounds.
    """

    def __init__(self, folder: Path, keep_until: int = 0) -> None:
        self.file: Lines = Lines(folder / "metrics.jsonl")
        self.lines = _kept(self.file, keep_until) if keep_until else []

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of earlier processes again, and open the file."""
        self.file.start(map(dumps, self.lines))

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Append one round."""
        self.lines.append(dict(entry))
        self.file.add(dumps(entry))


def _kept(file: Lines, until: int) -> list[dict[str, Any]]:
    """Return the lines of the rounds up to `until`, in their order; of a repeated round the last line counts."""
    by_round: dict[int, dict[str, Any]] = {}
    for text in file.read():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # damaged
            entry = json.loads(text)
            sum(entry[name] for name in (*BYTES, "seconds"))
            if 1 <= entry["round"] <= until:
                by_round[entry["round"]] = {**entry, "test_accuracy": entry.get("test_accuracy")}
    if missing := [str(number) for number in range(1, until + 1) if number not in by_round]:
        said = "%s: rounds %s are missing. The model is not affected, sums and means are."
        log(WARNING, said, file.path, ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else ""))
    return [by_round[number] for number in sorted(by_round)]


def result_of(
    lines: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
    rounds: int,
    final: Score | None = None,
    final_columns: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of ``result.json``: the fields `identity` and what the `lines` of ``metrics.jsonl`` add up to.

    `final` and `final_columns`, the evaluation of the final model, stand for the line of round `rounds` if it is lost.
    """
    if final is not None and not any(one["round"] == rounds and one["test_accuracy"] is not None for one in lines):
        lost = {"round": rounds, "test_accuracy": final.accuracy, "seconds": 0, **dict.fromkeys(BYTES, 0)}
        lines = [*lines, {**lost, **(final_columns or {})}]

    def last(*names: str) -> dict[str, Any]:
        columns = {name: [one[name] for one in lines if one.get(name) is not None] for name in names}
        return {name: values[-1] for name, values in columns.items() if values}

    accuracies = [entry["test_accuracy"] for entry in lines if entry["test_accuracy"] is not None]
    widths = last("width_accuracy")
    replies: Counter[str] = Counter(dict.fromkeys(widths.get("width_accuracy", {}), 0))
    for entry in lines:
        replies.update(entry.get("width_replies", {}))
    return {
        **identity,
        "rounds": rounds,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies) if accuracies else None,
        "smoothed_accuracy": asdict(smoothed(np.asarray(accuracies))) if accuracies else None,
        "last_ten_accuracy": float(np.mean(accuracies[-WINDOW:])) if accuracies else None,
        **last("validation_accuracy", *SPREADS, "client_accuracy"),
        "class_accuracy": [None if math.isnan(share) else share for share in final.per_class] if final else None,
        **widths,
        **({"width_replies": dict(replies)} if any("width_replies" in entry for entry in lines) else {}),
        "bytes_total": sum(entry["bytes_down"] + entry["bytes_up"] for entry in lines),
        "seconds_total": sum(entry["seconds"] for entry in lines),
        "versions": versions(),
        "commit": commit(),
    }


def stopped(lines: Sequence[Mapping[str, Any]], stop: StopSettings) -> dict[str, Any] | None:
    """Return why the run ends now: ``stopped`` of ``result.json``; None if it goes on.

    Its fields are ``reason`` (``target`` or ``patience``), ``metric``, ``value`` (the last one), ``best``,
    ``best_round`` and ``meaning``, a sentence. A metric with ``loss`` in its name improves downwards, any other one
    upwards. A ConfigError says that the run was evaluated and has no such metric.
    """
    if stop.patience is None and stop.target is None:
        return None
    validated = any("validation_accuracy" in line for line in lines)
    metric = stop.metric or ("validation_accuracy" if validated else "test_accuracy")
    scored = [(line["round"], line[metric]) for line in lines if isinstance(line.get(metric), int | float)]
    if not scored:
        if evaluated := next((line for line in lines if line["test_accuracy"] is not None), None):
            raise ConfigError(f"stop.metric={metric}: no such column in metrics.jsonl. {nearest(metric, [*evaluated])}")
        return None
    sign = -1 if "loss" in metric else 1
    values = [sign * value for _, value in scored]
    best_round, best = scored[values.index(max(values))]
    since = len(values) - 1 - values.index(max(values))
    facts = {"metric": metric, "value": scored[-1][1], "best": best, "best_round": best_round}
    if stop.target is not None and values[-1] >= sign * stop.target:
        reason, what = "target", f"reached {scored[-1][1]:.4g}"
    elif stop.patience is not None and since >= stop.patience:
        reason, what = "patience", f"has not improved since round {best_round} ({best:.4g})"
    else:
        return None
    return {"reason": reason, **facts, "meaning": f"Stopped early: {metric} {what}."}


def refuse_idle(lines: Sequence[Mapping[str, Any]], rates: str, again: str) -> None:
    """Raise a FederationError if no reply was ever accepted: lower `rates` if training diverges, and start `again`."""
    lost = any(line.get("dropped") for line in lines)
    if not lost or any(line.get("bytes_up") or line.get("train_loss") is not None for line in lines):
        return
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update(line.get("rejected") or {})
    why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(5)) or "no answer"
    cure = "No client answered before the deadline. Raise it, or look at the clients' logs or at clock.events"
    if reasons:
        cure = "The warnings above show the clients' answers"
    if DIVERGED & reasons.keys():
        cure = f"The training probably diverges: lower {rates}, or set train.clip"
    done = counted(len(lines), "round")
    raise FederationError(f"{done} and no accepted reply ({why}): nothing was trained. {cure}. Then {again}.")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes."""
    return {"flwr": installed(), **{name: version(name) for name in ("torch", "numpy")}}


@cache
def commit() -> str | None:
    """Return the git commit of the checkout that holds this code; None outside a checkout."""
    if given := os.environ.get("FEDCROSS_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def machine(gpu: str | None = None) -> str:
    """Return one line: architecture, system, processor, number of cores, and the name of the `gpu` that is used."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if found := re.search(
            r"^model name\s*:\s*(\S.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE
        ):
            name = found[1].strip()
    known = f"{platform.machine()} {platform.system()}, {name}, {os.cpu_count()} cores"
    return f"{known}, {gpu}" if gpu else known
