"""Any partitioner of Flower Datasets, by its name.

The partitioner sees a data set with two columns, ``label`` (a number) and ``user``, and one row per training example.
Source: flwr-datasets, https://flower.ai/docs/datasets.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
from pydantic import Field

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.extras import needed
from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.tasks.base import Partition, Task
from fedcross.tasks.partition._common import owned

ROW = "row"
"""Column with the number of each example, to find it again in a part."""


class Params(Settings):
    """Settings of a partitioner of Flower Datasets.

    Attributes
    ----------
    partitioner : str
        Name of its class, such as ``IidPartitioner`` or ``DirichletPartitioner``.
    clients : int or None
        Its ``num_partitions``, if it has one.
    args : dict
        Its other arguments. Of those that are not given, ``partition_by`` is ``label`` (or ``user`` for the
        partitioners by owner), and ``seed`` follows from the run's seed.
    """

    partitioner: str = "IidPartitioner"
    clients: int | None = Field(default=None, ge=1)
    args: dict[str, Any] = Field(default_factory=dict)


def _create(params: Params, seed: int) -> Any:
    """Return the partitioner, not yet applied to anything."""
    where = f"partition.partitioner={params.partitioner}"
    known = needed("flwr_datasets.partitioner", "data", where)
    names = [name for name in known.__all__ if name != "Partitioner" and not name.startswith("Vertical")]
    if params.partitioner not in names:
        raise ConfigError(f"{where}: Flower Datasets has no such partitioner. {nearest(params.partitioner, names)}")
    kind = getattr(known, params.partitioner)
    takes = inspect.signature(kind).parameters
    if unknown := [name for name in params.args if name not in takes]:
        near = nearest(unknown[0], list(takes))
        raise ConfigError(f"partition.args.{unknown[0]}: {params.partitioner} has no such argument. {near}")
    arguments = {**_defaults(params, seed), **params.args}
    arguments = {name: value for name, value in arguments.items() if name in takes}
    missing = [n for n, p in takes.items() if p.default is inspect.Parameter.empty and n not in arguments]
    if missing:
        setting = "partition.clients" if missing[0] == "num_partitions" else f"+partition.args.{missing[0]}"
        raise ConfigError(f"{where}: it needs {missing[0]}. Write {setting}=VALUE.")
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error


def _defaults(params: Params, seed: int) -> dict[str, Any]:
    """Return the arguments that need not be given; those that a partitioner does not have are left out later."""
    by = "user" if "NaturalId" in params.partitioner else "label"
    found: dict[str, Any] = {"partition_by": by, "seed": key(seed, "partition flwr_datasets") % 2**32}
    return found if params.clients is None else {**found, "num_partitions": params.clients}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") + "."


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return the parts that the partitioner makes of the training examples.

    Raises
    ------
    ConfigError
        If there is no such partitioner, it refuses its arguments or the data, or the extra is not installed.
    DataError
        If a client gets no examples.
    """
    partitioner = _create(params, seed)
    datasets = needed("datasets", "data", f"partition.partitioner={params.partitioner}")
    y, users = np.asarray(task.train.y), task.train.users
    columns: dict[str, Any] = {"label": y, ROW: np.arange(len(y))}
    if users is not None:
        columns["user"] = np.asarray(users)
    elif "NaturalId" in params.partitioner and "partition_by" not in params.args:
        raise ConfigError(f"partition.partitioner={params.partitioner}: task {task.name} has no users.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a paragraph per repeated draw
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            parts = [
                np.asarray(partitioner.load_partition(client).with_format("numpy")[ROW][:], dtype=np.int64)
                for client in range(partitioner.num_partitions)
            ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"partition.partitioner={params.partitioner}: {_one_line(error)}") from error
    return Partition(train=owned(parts, where=f"partition.partitioner={params.partitioner}: "))
