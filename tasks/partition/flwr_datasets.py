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

from fedcross.core.errors import ConfigError, nearest, needed
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
        Its other arguments. By default ``partition_by`` is ``label`` or ``user``, and ``seed`` the run's.
    """

    partitioner: str = "IidPartitioner"
    clients: int | None = Field(default=None, ge=1)
    args: dict[str, Any] = Field(default_factory=dict)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return the parts that the partitioner makes of the training examples; its errors come as ConfigError."""
    where = f"partition.partitioner={params.partitioner}"
    known = needed("flwr_datasets.partitioner", "data", where)
    names = [name for name in known.__all__ if name != "Partitioner" and not name.startswith("Vertical")]
    if params.partitioner not in names:
        raise ConfigError(f"{where}: Flower Datasets has no such partitioner. {nearest(params.partitioner, names)}")
    kind = getattr(known, params.partitioner)
    takes = inspect.signature(kind).parameters
    defaults: dict[str, Any] = {
        "partition_by": "user" if "NaturalId" in params.partitioner else "label",
        "seed": key(seed, "partition flwr_datasets") % 2**32,
        "num_partitions": params.clients,
    }
    given = {name: value for name, value in defaults.items() if name in takes and value is not None} | params.args
    columns: dict[str, Any] = {"label": np.asarray(task.train.y), ROW: np.arange(len(task.train))}
    if task.train.users is not None:
        columns["user"] = np.asarray(task.train.users)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a paragraph per repeated draw
            partitioner = kind(**given)
            partitioner.dataset = needed("datasets", "data", where).Dataset.from_dict(columns)
            loaded = (partitioner.load_partition(client) for client in range(partitioner.num_partitions))
            parts = [np.asarray(part.with_format("numpy")[ROW][:], dtype=np.int64) for part in loaded]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        cure = f"Set partition.clients or +partition.args.NAME=VALUE; it takes {', '.join(takes)}."
        raise ConfigError(f"{where}: {reason}. {cure}") from error
    return Partition(train=owned(parts, where=f"{where}: "))
