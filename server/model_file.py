"""The file ``model.safetensors`` of a run: its global model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedcross.core.private_files import write_atomically
from fedcross.strategies.pool.layout import Arrays
from fedcross.tasks.models.weights import every_name


def write_model(path: Path, arrays: Arrays, again: Mapping[str, str] | None = None) -> None:
    """Write the global model as a safetensors file.

    `again` maps further names of tied weights to the name of the array; torch needs every name of the ``state_dict``.
    """
    write_atomically(path, save({n: np.asarray(a, order="C") for n, a in every_name(arrays, again or {}).items()}))
