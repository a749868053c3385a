"""The record of a run on disk: one line of ``metrics.jsonl`` per round, and ``result.json`` at the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
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

from fedcross.core.errors import FederationError, counted
from fedcross.core.private_files import open_own
from fedcross.core.private_files import write_atomically as write_atomically
from fedcross.core.strict_json import dumps
from fedcross.engines.flower_private import installed
from fedcross.server.observers import Observer
from fedcross.server.run_folder import writing
from fedcross.strategies.round.ledger import RoundReport
from fedcross.tasks.scoring import WINDOW, Score, smoothed

#: Columns of the traffic, and of clients' accuracies; ``result.json`` repeats their last values.
BYTES = ("bytes_down", "bytes_up")
SPREADS = (
    *("client_accuracy_mean", "client_accuracy_worst_tenth", "client_accuracy_std"),
    *("local_accuracy", "local_accuracy_worst_tenth", "local_accuracy_std"),
)


class Metrics(Observer):
    """Writes ``metrics.jsonl``; each line is on disk (fsync) when :meth:`round_finished` returns.

    Parameters
    ----------
    folder : Path
        The run's folder.
    keep_until : int
        Lines up to this round stay; later ones, which an interrupted run left, are removed. A warning names missing
        rounds.

    Attributes
    ----------
    lines : list of dict
        The lines in the file.
    """

    def __init__(self, folder: Path, keep_until: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        with writing(self.path):
            self.lines = _kept(self.path, keep_until) if keep_until else []

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of earlier processes again, and open the file."""
        with writing(self.path):
            write_atomically(self.path, "".join(dumps(entry) + "\n" for entry in self.lines).encode())
            self._file = open_own(self.path, "a")

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Append one round."""
        self.lines.append(dict(entry))
        with writing(self.path):
            self._file.write(dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk, an earlier call has raised the error
            self._file.close()


def _kept(path: Path, until: int) -> list[dict[str, Any]]:
    """Return the lines of the rounds up to `until`, in their order; of a repeated round the last line counts."""
    by_round: dict[int, dict[str, Any]] = {}
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off or damaged
            entry = json.loads(text)
            sum(entry[name] for name in ("bytes_down", "bytes_up", "seconds"))
            if 1 <= entry["round"] <= until:
                by_round[entry["round"]] = {**entry, "test_accuracy": entry.get("test_accuracy")}
    if missing := [str(number) for number in range(1, until + 1) if number not in by_round]:
        said = "%s: rounds %s are missing. The model is not affected, sums and means are."
        log(WARNING, said, path, ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else ""))
    return [by_round[number] for number in sorted(by_round)]


def line_of(report: RoundReport, score: Score | None, seconds: float) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` of one round, which took `seconds`."""
    return {
        "round": report.round,
        "test_accuracy": score.accuracy if score else None,
        "test_loss": score.loss if score and math.isfinite(score.loss) else None,
        **{name: getattr(report, name) for name in ("train_loss", "clients", "dropped")},
        "rejected": dict(report.rejected),
        **{name: getattr(report, name) for name in ("clipped", "lightened", "spares", "exchanges", *BYTES)},
        "seconds": seconds,
        **{name: getattr(report, name) for name in ("seconds_training", "seconds_aggregation")},
        **({"width_replies": dict(report.width_replies)} if report.width_replies else {}),
        **report.metrics,
    }


def result_of(
    lines: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
    final: Score | None = None,
    rounds: int | None = None,
    final_widths: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the content of ``result.json``.

    Parameters
    ----------
    lines : sequence of dict
        The lines of ``metrics.jsonl``.
    identity : mapping
        Fields that describe the run.
    final : Score, optional
        The last evaluation; ``class_accuracy`` has null for a class without test examples.
    rounds : int, optional
        The round of the model, where it is not that of the last line; ``rounds_missing`` then counts lost lines. If
        that round has no accuracy, `final` and `final_widths` stand for it.
    """
    last = lines[-1]["round"] if lines else 0
    rounds = last if rounds is None else rounds
    accuracies = [entry["test_accuracy"] for entry in lines if entry["test_accuracy"] is not None]
    widths = [entry["width_accuracy"] for entry in lines if entry.get("width_accuracy")]
    if final is not None and rounds not in {entry["round"] for entry in lines if entry["test_accuracy"] is not None}:
        accuracies.append(final.accuracy)
        widths += [dict(final_widths)] if final_widths else []
    replies: Counter[str] = Counter(dict.fromkeys(widths[-1], 0) if widths else {})
    for entry in lines:
        replies.update(entry.get("width_replies", {}))
    spreads = {name: found[-1] for name in SPREADS if (found := [one[name] for one in lines if name in one])}
    clients = [entry["client_accuracy"] for entry in lines if entry.get("client_accuracy")]
    validation = [entry["validation_accuracy"] for entry in lines if entry.get("validation_accuracy") is not None]
    return {
        **identity,
        "rounds": rounds,
        **({"rounds_missing": rounds - len(lines)} if rounds != len(lines) else {}),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies) if accuracies else None,
        "smoothed_accuracy": asdict(smoothed(np.asarray(accuracies))) if accuracies else None,
        "last_ten_accuracy": float(np.mean(accuracies[-WINDOW:])) if accuracies else None,
        **({"validation_accuracy": validation[-1]} if validation else {}),
        **spreads,
        **({"client_accuracy": clients[-1]} if clients else {}),
        "class_accuracy": [None if math.isnan(share) else share for share in final.per_class] if final else None,
        **({"width_accuracy": widths[-1]} if widths else {}),
        **({"width_replies": dict(replies)} if any("width_replies" in entry for entry in lines) else {}),
        "bytes_total": sum(entry["bytes_down"] + entry["bytes_up"] for entry in lines),
        "seconds_total": sum(entry["seconds"] for entry in lines),
        "versions": versions(),
        "commit": commit(),
    }


def refuse_idle(lines: Sequence[Mapping[str, Any]], again: str) -> None:
    """Raise a FederationError if no reply was ever accepted; `again` says how the run is started again."""
    lost = any(line.get("dropped") for line in lines)
    if not lost or any(line.get("bytes_up") or line.get("train_loss") is not None for line in lines):
        return
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update(line.get("rejected") or {})
    if why := ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(5)):
        cure = "The warnings above show the clients' answers. Fix the reason"
    else:
        cure = "No client answered before the deadline. Raise it, look at the clients' logs or at clock.events,"
    raise FederationError(
        f"{counted(len(lines), 'round')} and no accepted reply ({why or 'no answer'}): nothing was trained. {cure} and "
        f"{again}."
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes."""
    return {"flwr": installed(), **{name: version(name) for name in ("torch", "numpy")}}


def commit() -> str | None:
    """Return the git commit of the checkout that holds this code; None outside a checkout."""
    return os.environ.get("FEDCROSS_COMMIT") or _commit(Path(__file__).resolve().parent)


@cache
def _commit(folder: Path) -> str | None:
    """Return the commit of `folder` at the first call; git looks at every file, which takes as long as a round."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
