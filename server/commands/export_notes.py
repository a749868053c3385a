"""What an exported network's file says of its inputs and scores, so that who serves it needs nothing else.

An ONNX file carries it as ``metadata_props``, a TorchScript file as the extra file ``fedcross.json``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedcross.tasks.reading.params import Normalise

if TYPE_CHECKING:
    from fedcross.tasks.base import Task

#: Name of the extra file in TorchScript.
EXTRA = "fedcross.json"


def notes(task: Task) -> dict[str, str]:
    """Return how raw examples of `task` become the network's inputs, and what its scores mean.

    Every value but ``task``, ``inputs`` and ``prepare`` is JSON.

    Returns
    -------
    dict of str
        ``inputs`` (dtype), ``shape`` (of one input), ``number_of_classes``, where they have names ``classes`` (in the
        order of the scores). For numbers ``scale``, ``mean`` and ``std``, one per channel or feature (one value stands
        for all), and ``features`` (columns of a table); for texts ``vocabulary``, the number of token ids.
    """
    found = {"task": task.name, "shape": json.dumps(list(task.shape))}
    if task.label_names:
        found["classes"] = json.dumps(list(task.label_names))
    found["number_of_classes"] = json.dumps(task.classes)
    if task.feature_names:
        found["features"] = json.dumps(list(task.feature_names))
    prepare = task.prepare
    if isinstance(prepare, Normalise):
        found |= {"inputs": "float32", "prepare": "inputs = (raw / scale - mean) / std"}
        found |= {"scale": json.dumps(prepare.scale), "mean": json.dumps(prepare.mean), "std": json.dumps(prepare.std)}
    elif task.vocabulary:
        found |= {"inputs": "int64", "prepare": "inputs = token ids, 0 is padding"}
        found["vocabulary"] = json.dumps(task.vocabulary)
    return found
