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

from fedcross.core.errors import FederationError, StorageError, counted, remedy
from fedcross.core.private_files import open_own
from fedcross.core.private_files import write_atomically as write_atomically
from fedcross.core.replacing import sync_folder as sync_folder
from fedcross.core.strict_json import dumps
from fedcross.tasks.scoring import WINDOW, Score, smoothed


def result(
    lines: list[dict[str, Any]],
    identity: Mapping[str, Any],
    final: Score | None = None,
    rounds: int | None = None,
    final_widths: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the ``result.json`` object for a run with metric `lines` and the descriptive fields of `identity`.

    `final` is the last evaluation. Its accuracies per class become ``class_accuracy``; a class without test examples
    gets null. Where models have several widths, ``width_accuracy`` has the last accuracy of each, and
    ``width_replies`` the number of replies that were accepted for it in all rounds.

    `rounds` is the round of the model; None: that of the last line. Where lines are lost, ``rounds_missing`` has their
    number, and if the last one is, `final` and `final_widths` stand for its accuracies.
    """
    rounds = (lines[-1]["round"] if lines else 0) if rounds is None else rounds
    lost = rounds - len(lines)
    class_accuracy = [None if math.isnan(share) else share for share in final.per_class] if final else None
    widths = [entry["width_accuracy"] for entry in lines if entry.get("width_accuracy")]
    replies: Counter[str] = Counter()
    for entry in lines:
        replies.update(entry.get("width_replies", {}))
    if replies and widths:
        replies = Counter({**dict.fromkeys(widths[-1], 0), **replies})
    accuracies = [entry["test_accuracy"] for entry in lines if entry["test_accuracy"] is not None]
    if final is not None and rounds > (lines[-1]["round"] if lines else 0):
        accuracies.append(final.accuracy)
        widths += [dict(final_widths)] if final_widths else []
    return {
        **identity,
        "rounds": rounds,
        **({"rounds_missing": lost} if lost else {}),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies) if accuracies else None,
        "smoothed_accuracy": asdict(smoothed(np.asarray(accuracies))) if accuracies else None,
        "last_ten_accuracy": float(np.mean(accuracies[-WINDOW:])) if accuracies else None,
        "class_accuracy": class_accuracy,
        **({"width_accuracy": widths[-1]} if widths else {}),
        **({"width_replies": dict(replies)} if replies else {}),
        "bytes_total": sum(entry["bytes_down"] + entry["bytes_up"] for entry in lines),
        "seconds_total": sum(entry["seconds"] for entry in lines),
        "versions": versions(),
        "commit": commit(),
    }


def refuse_idle(
    lines: Sequence[Mapping[str, Any]], anew: str = "start again in another folder", replayed: bool = False
) -> None:
    """Raise a FederationError if no reply was ever accepted: such a run has trained nothing, and must not pass.

    `anew` is how it is started again; `replayed` whether a record says which visits are lost.
    """
    lost = any(line.get("dropped") for line in lines)
    # Requests say nothing: a slot may be lost without one, as its client is not connected, and another have several.
    taken = any(line.get("bytes_up") or line.get("train_loss") is not None for line in lines)
    if lost and not taken:
        reasons: Counter[str] = Counter()
        for line in lines:
            reasons.update(line.get("rejected") or {})
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(5))
        if why:
            cure = "The warnings above say what the clients answered. Mend it"
        elif replayed:
            cure = "The record of clock.events accepted none of these visits. Name another one"
        else:
            cure = (
                "No visit was over before the deadline, or no client was there. Raise clock.deadline_s or "
                "federation.deadline_s, or look at the clients' own logs,"
            )
        raise FederationError(
            f"{counted(len(lines), 'round')} and not one accepted reply ({why or 'no answer'}): nothing was trained. "
            f"{cure} and {anew}."
        )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes."""
    return {name: version(name) for name in ("flwr", "torch", "numpy")}


def commit() -> str | None:
    """Return the git commit of the checkout that holds this code; None outside a checkout."""
    return os.environ.get("FEDCROSS_COMMIT") or _described(Path(__file__).resolve().parent)


@cache
def _described(folder: Path) -> str | None:
    """Return the commit of `folder` when this process first asked: its code is that of then, however many runs follow.

    Git looks at every file of the checkout, which takes as long as a round of a small run.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Ledger:
    """Writes ``metrics.jsonl``; each line is on disk (fsync) when :meth:`add` returns.

    Parameters
    ----------
    folder : Path
        The run's folder.
    keep_until : int
        The file keeps the lines up to this round. Later lines, which an interrupted run left, are removed. A warning
        names rounds up to this one that are missing, and those that occur more than once, of which the last line stays.
    """

    def __init__(self, folder: Path, keep_until: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        try:
            self.lines = _kept(self.path, keep_until) if keep_until else []
            write_atomically(self.path, "".join(dumps(entry) + "\n" for entry in self.lines).encode())
            self._file = open_own(self.path, "a")
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). Choose another output folder, or {remedy(error)} and "
                "continue with resume=RUN."
            ) from error

    def add(self, entry: dict[str, Any]) -> None:
        """Append one round."""
        self.lines.append(entry)
        try:
            self._file.write(dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk, `add` has already raised the error
            self._file.close()


#: Fields that every line of metrics has; without these numbers it cannot be counted.
_COUNTED = ("bytes_down", "bytes_up", "seconds")


def _kept(path: Path, until: int) -> list[dict[str, Any]]:
    """Return the lines of the rounds up to `until`, in their order; log what is missing, repeated or unreadable."""
    try:
        found = [_parsed(text) for text in path.read_bytes().splitlines()]
    except FileNotFoundError:
        found = []
    entries = [entry for entry in found if entry is not None and 1 <= entry["round"] <= until]
    times = Counter(entry["round"] for entry in entries)
    if repeated := sorted(number for number, count in times.items() if count > 1):
        log(WARNING, "%s: %s more than once; the last line of each counts.", path, _rounds(repeated))
    if missing := [number for number in range(1, until + 1) if number not in times]:
        log(WARNING, "%s: %s missing. The model does not depend on it, sums and means do.", path, _rounds(missing))
    by_round = {entry["round"]: entry for entry in entries}
    return [by_round[number] for number in sorted(by_round)]


def _rounds(numbers: Sequence[int]) -> str:
    """Return ``round 3`` or ``rounds 3, 4, 5``; a long list is cut."""
    shown = ", ".join(map(str, numbers[:10]))
    rest = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return f"round {shown} is" if len(numbers) == 1 else f"rounds {shown}{rest} are"


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line of metrics; None if it is not one."""
    try:
        entry = json.loads(text)
    except ValueError:  # also if it is not UTF-8
        return None
    if not isinstance(entry, dict) or type(entry.get("round")) is not int:
        return None
    counted = [entry.get(name) for name in _COUNTED]
    accuracy = entry.get("test_accuracy")
    whole = all(isinstance(value, int | float) for value in (*counted, 0 if accuracy is None else accuracy))
    return {**entry, "test_accuracy": accuracy} if whole else None
