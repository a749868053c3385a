"""A run for the analyses of its models: rebuilds task, partition and network, and reads snapshots of chosen rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.tasks.base import Partition, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Options:
    """What to analyse.

    Rounds (all kept ones if empty), slots of single models, indices of test images, number of test examples; axes and
    directions of loss surfaces; folder of the data sets (that of the run if None).
    """

    rounds: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    images: tuple[int, ...] = ()
    examples: int = 500
    radius: float = 1.0
    points: int = 21
    seed: int = 1
    data: Path | None = None


@dataclass(frozen=True)
class RecordedExchange:
    """The uploads of one exchange: models, and the clients that trained them, by slot."""

    round: int
    exchange: int
    models: Mapping[int, Arrays]
    clients: Mapping[int, int]


class Subject:
    """A run folder.

    Parameters
    ----------
    folder : Path
        Written by ``fedcross``, for most analyses with ``snapshots.rounds=[...]``.
    root : Path or None
        Folder of the data sets; that of the run if None.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        from omegaconf import OmegaConf

        from fedcross.conf.schema import check

        def read() -> Any:
            return OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "config.yaml"), resolve=False)

        raw = dict(_read(folder, ".hydra/config.yaml", read))
        if root is not None and "root" in raw["task"]:
            raw["task"]["root"] = str(root)
        self.folder, self.config = folder, check(raw)
        self.seed = self.config.seed

    @property
    def name(self) -> str:
        """Short description of the run, for titles."""
        beta = getattr(self.config.partition, "beta", None)
        names = ", ".join(self.config.names[group] for group in ("method", "task", "partition"))
        return names if beta is None else f"{names} beta={beta}"

    @property
    def task(self) -> Task:
        """The data set."""
        return self.config.load_data().task

    @property
    def partition(self) -> Partition:
        """The partition: which client has which examples."""
        return self.config.load_data().partition

    def network(self, arrays: Arrays) -> nn.Module:
        """Return the configured network, as the method wraps it, with weights `arrays`, in evaluation mode."""
        from fedcross.tasks.models.weights import load_arrays

        model, _ = self.config.network(self.task)
        if set(arrays) > set(model.state_dict()):  # a final model, with arrays that only its evaluation needs
            model = self.config.new_method().network(model, deployed=True)
        try:
            load_arrays(model, arrays)
        except RuntimeError as error:
            raise DataError(f"{self.folder}: the kept weights do not fit its network ({error}).") from error
        return model.eval()

    def rounds(self, wanted: Sequence[int] = ()) -> list[int]:
        """Return the rounds with snapshots, or those of them that are `wanted`.

        Raises
        ------
        DataError
            If there is none, or a wanted round is missing.
        """
        names = (path.stem.split("-") for path in (self.folder / "snapshots").glob("round-*.safetensors"))
        kept = sorted({int(name[1]) for name in names if name[1].isdigit()})
        if not kept:
            raise DataError(f"{self.folder}: no snapshots. Run it with snapshots.rounds=[1,10,100], for example.")
        if missing := sorted(set(wanted) - set(kept)):
            raise DataError(f"{self.folder}: no snapshot of round {missing}. There are {kept}.")
        return sorted(wanted) if wanted else kept

    def exchanges(self, number: int) -> list[RecordedExchange]:
        """Return the exchanges of round `number`, in order."""
        paths = (self.folder / "snapshots").glob(f"round-{number:06d}-exchange-*.safetensors")
        found = [_read(self.folder, path.name, partial(_exchange, path)) for path in paths]
        return sorted(found, key=lambda one: one.exchange)

    def global_model(self, number: int) -> Arrays:
        """Return the global model after round `number`."""
        return self._model(Path("snapshots") / f"round-{number:06d}.safetensors")

    def final_model(self) -> Arrays:
        """Return the final global model of a finished run."""
        return self._model(Path("model.safetensors"))

    def _model(self, name: Path) -> Arrays:
        from safetensors.numpy import load_file

        arrays: Arrays = _read(self.folder, str(name), lambda: dict(load_file(self.folder / name)))
        return arrays

    def sample(self, count: int) -> NDArray[np.int64]:
        """Return indices of at most `count` test examples, equally many of each class where there are enough."""
        y = self.task.test.y
        order = stream(self.seed, "analysis").permutation(len(y))
        each = max(count // self.task.classes, 1)
        picked = [order[y[order] == label][:each] for label in range(self.task.classes)]
        return np.sort(np.concatenate(picked)).astype(np.int64)

    def inputs(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """Return the prepared test inputs at `indices`."""
        return self.task.prepare(self.task.test.x[indices])

    def label(self, label: int) -> str:
        """Return the name of a class."""
        names = self.task.label_names
        return str(names[label]) if len(names) else str(label)


def _read(folder: Path, name: str, reader: Callable[[], Any]) -> Any:
    """Return what `reader` reads; a file that is missing or damaged is a DataError."""
    from omegaconf.errors import OmegaConfBaseException
    from safetensors import SafetensorError
    from yaml import YAMLError

    try:
        return reader()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder}: no {name}. Give the folder of a finished run.") from error
    except (SafetensorError, YAMLError, OmegaConfBaseException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: {name} is damaged ({error}).") from error


def _exchange(path: Path) -> RecordedExchange:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        models: dict[int, Arrays] = {}
        for key in file.keys():  # noqa: SIM118 - not a dict
            slot, name = key.split("/", 1)
            models.setdefault(int(slot), {})[name] = file.get_tensor(key)
    clients = {int(one["slot"]): int(one["client"]) for one in json.loads(header["uploads"])}
    return RecordedExchange(int(header["round"]), int(header["exchange"]), dict(sorted(models.items())), clients)
