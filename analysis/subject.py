"""``fedcross analyse``: plots of the models of runs, rebuilt by :class:`Subject` from snapshots of chosen rounds."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from yaml import YAMLError

from fedcross.conf.schema import check
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.core.randomness import stream
from fedcross.tasks.base import Partition, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

Arrays = dict[str, NDArray[Any]]
KINDS = {
    "cka": "CKA of layers, before and after the exchange and between clients",
    "tsne": "t-SNE of embeddings at chosen rounds",
    "forgetting": "accuracy per class before and after the exchange",
    "gradcam": "Grad-CAM of chosen test images",
    "landscape": "loss surfaces and sharpness of final models, and the diversity of pools",
}
"""Analysis -> short description; each is a module of this package.

Its ``draw(subject, options)`` returns figures by name, and a table or None. ``landscape`` draws a list of subjects.
"""


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


class RecordedExchange(NamedTuple):
    """The uploads of one exchange: models, and the clients that trained them, by slot."""

    models: Mapping[int, Arrays]
    clients: Mapping[int, int]


class Subject:
    """The run in `folder`, for most analyses with ``snapshots.rounds=[...]``; `root` is another folder of data sets."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.folder = folder
        raw: dict[str, Any] = self._read(".hydra/config.yaml", lambda p: OmegaConf.to_container(OmegaConf.load(p)))
        if root is not None and "root" in raw["task"]:
            raw["task"]["root"] = str(root)
        self.config = check(raw)
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
        """Return the rounds with snapshots, or those of them that are `wanted`; a DataError says what is missing."""
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
        ordered = sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]))
        return [self._read(f"snapshots/{path.name}", _exchange) for path in ordered]

    def visits(self, number: int, slots: Sequence[int]) -> list[tuple[str, Arrays]]:
        """Return title and model of each of `slots` after each exchange of round `number`."""
        return [
            (f"model {slot}, round {number}, at client {one.clients[slot]}", one.models[slot])
            for slot in slots
            for one in self.exchanges(number)
            if slot in one.models
        ]

    def global_model(self, number: int | None = None) -> Arrays:
        """Return the global model after round `number`, or the final one of a finished run."""
        name = "model.safetensors" if number is None else f"snapshots/round-{number:06d}.safetensors"
        return dict(self._read(name, load_file))

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

    def panels(
        self, title: str, rows: int, columns: int, size: tuple[float, float], **style: Any
    ) -> tuple[Figure, NDArray[np.object_]]:
        """Return a figure of `size` inches with `title` and the run's name, and its axes (rows, columns)."""
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(f"{title}: {self.name}", x=0.01, ha="left", **style)
        return figure, figure.subplots(rows, columns, squeeze=False)

    def _read(self, name: str, reader: Callable[[Path], Any]) -> Any:
        """Return what `reader` reads of the file `name`; one that is missing or damaged is a DataError."""
        try:
            return reader(self.folder / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{self.folder}: no {name}. Give the folder of a finished run.") from error
        except (SafetensorError, YAMLError, OmegaConfBaseException, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.folder}: {name} is damaged ({error}).") from error


def _exchange(path: Path) -> RecordedExchange:
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        models: dict[int, Arrays] = {}
        for key in sorted(file.keys(), key=lambda key: int(key.split("/", 1)[0])):
            slot, name = key.split("/", 1)
            models.setdefault(int(slot), {})[name] = file.get_tensor(key)
    clients = {int(one["slot"]): int(one["client"]) for one in json.loads(header["uploads"])}
    return RecordedExchange(models, clients)


def analyse(runs: Sequence[Path], kind: str, out: Path, options: Options) -> list[Path]:
    """Write the analysis `kind` of the runs in these folders, as pictures and a table, into `out`; return the files.

    A ConfigError says that `kind` takes one run, a DataError that the run did not keep these models or that the data
    set is missing, a StorageError that `out` cannot be written.
    """
    if len(runs) > 1 and kind != "landscape":
        raise ConfigError(f"{kind} shows one run. Give one folder; landscape compares several.")
    subjects = [Subject(run, options.data) for run in runs]
    draw = importlib.import_module(f"fedcross.analysis.{kind}").draw
    figures, table = draw(subjects if kind == "landscape" else subjects[0], options)
    pictures = {out / f"{name}.png": figure for name, figure in figures.items()}
    tables = {out / f"{kind}.csv": table} if table is not None else {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, figure in pictures.items():
            figure.savefig(file, dpi=130)
        for file, frame in tables.items():
            frame.to_csv(file, index=False)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error}). Choose another folder with --out.") from error
    return [*pictures, *tables]
