"""Whether the files of a run's folder are of one run: what copying, editing and lost lines leave disagrees."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.analysis.runs import Curve
from fedcross.core.overrides import shown

#: Field of ``result.json`` -> the setting of the configuration that it repeats.
SETTINGS = {
    "method": "method.name",
    "task": "task.name",
    "model": "model.name",
    "partition": "partition.name",
    "seed": "seed",
}
#: Largest relative difference between a number and the six digits of it that a record has.
ROUNDED = 1e-5


def result_fault(
    result: Mapping[str, Any], settings: Mapping[str, Any], columns: Mapping[str, Curve], folder: Path
) -> str:
    """Return how ``result.json`` disagrees with configuration or metrics; empty if it does not.

    What one of the files lacks, as those of older versions do, is no fault. The result of a run that was made longer
    and is not at its end is that of its former end: only its settings count.

    Parameters
    ----------
    result : mapping
        ``result.json``; empty for none.
    settings : mapping of str to value
        The configuration with dotted names.
    columns : mapping of str to array of float, shape (rounds,)
        The metrics of all rounds.
    folder : Path
        The run's folder, which a message names.
    """
    for name, setting in SETTINGS.items():
        told, asked = result.get(name), settings.get(setting)
        if None not in (told, asked) and "${" not in str(asked) and told != asked:
            return f"result.json is of another run than .hydra/config.yaml: {name} {told!r}, not {asked!r}"
    last, planned = int(columns["round"][-1]), settings.get("rounds")
    if isinstance(planned, int) and last < planned:
        return ""
    accuracy = columns["test_accuracy"]
    known = accuracy[~np.isnan(accuracy)]
    found = {"rounds": float(last), "final_accuracy": float(known[-1]), "best_accuracy": float(known.max())}
    for name, value in found.items():
        told = result.get(name, value)
        if not isinstance(told, int | float) or not math.isclose(told, value, rel_tol=ROUNDED):
            return (
                f"result.json and metrics.jsonl disagree: {name} {json.dumps(told)} and {value:.6g}. If the metrics "
                f"are this run's, fedcross resume={shown(folder)} writes the result anew"
            )
    return ""


def missing(columns: Mapping[str, Curve], ended: int = 0) -> str:
    """Return which rounds up to their last one, and up to `ended`, the metrics lack; empty if they have all."""
    numbers = {int(number) for number in columns["round"]}
    lost = sorted(set(range(1, max(*numbers, ended) + 1)) - numbers)
    if not lost:
        return ""
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    return f"metrics.jsonl lacks round{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:10]))}{more}"


def digest_fault(folder: Path, digests: str) -> str:
    """Return which checkpoint of the run in `folder` has another digest than its file `digests` says; empty for none.

    A file that cannot be read proves nothing; neither does a round that the file lacks.
    """
    from safetensors import SafetensorError, safe_open

    try:
        lines = [json.loads(line) for line in (folder / digests).read_bytes().splitlines() if line]
        told = {line["round"]: line["digest"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    for path in sorted((folder / "checkpoints").glob("round-*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
            number = int(header["round"])
        except (OSError, SafetensorError, KeyError, ValueError):
            continue
        if told.get(number, header.get("digest")) != header.get("digest"):
            return f"{digests} is of another run than checkpoints/{path.name}"
    return ""
