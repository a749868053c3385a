"""The record of a run on disk: one line of ``metrics.jsonl`` per round, and ``result.json`` at the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import StorageError
from fedcross.tasks.scoring import WINDOW, Score, smoothed


def result(lines: list[dict[str, Any]], identity: Mapping[str, Any], final: Score | None = None) -> dict[str, Any]:
    """Return the ``result.json`` object for a run with metric `lines` and the descriptive fields of `identity`.

    `final` is the last evaluation. Its accuracies per class become ``class_accuracy``; a class without test examples
    gets null.
    """
    class_accuracy = [None if math.isnan(share) else share for share in final.per_class] if final else None
    accuracies = [entry["test_accuracy"] for entry in lines if entry["test_accuracy"] is not None]
    return {
        **identity,
        "rounds": lines[-1]["round"] if lines else 0,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies) if accuracies else None,
        "smoothed_accuracy": asdict(smoothed(np.asarray(accuracies))) if accuracies else None,
        "last_ten_accuracy": float(np.mean(accuracies[-WINDOW:])) if accuracies else None,
        "class_accuracy": class_accuracy,
        "bytes_total": sum(entry["bytes_down"] + entry["bytes_up"] for entry in lines),
        "seconds_total": sum(entry["seconds"] for entry in lines),
        "versions": {name: version(name) for name in ("flwr", "torch", "numpy")},
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the git commit of the checkout that holds this code; None outside a checkout."""
    if stated := os.environ.get("FEDCROSS_COMMIT"):
        return stated
    folder = Path(__file__).resolve().parent
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
    """Writes ``metrics.jsonl``; each line is on disk when :meth:`add` returns.

    Parameters
    ----------
    folder : Path
        The run's folder.
    keep_until : int
        The file keeps the lines up to this round. Later lines, which an interrupted run left, are removed.
    """

    def __init__(self, folder: Path, keep_until: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        self.lines: list[dict[str, Any]] = []
        try:
            if self.path.exists() and keep_until:
                for text in self.path.read_text().splitlines():
                    entry = _parsed(text)
                    if entry is not None and entry["round"] <= keep_until:
                        self.lines.append(entry)
            write_atomically(self.path, "".join(json.dumps(entry) + "\n" for entry in self.lines).encode())
            self._file = self.path.open("a")
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). Choose another output folder, or free disk space and "
                "continue with resume=RUN."
            ) from error

    def add(self, entry: dict[str, Any]) -> None:
        """Append one round."""
        self.lines.append(entry)
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error}). Free disk space, then resume.") from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk, `add` has already raised the error
            self._file.close()


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("round"), int) else None


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash leaves either the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of the folder `path` to disk (fsync)."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
