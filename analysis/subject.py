"""A run for the analyses of its models: rebuilds task, partition and network, and reads snapshots of chosen rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings, find, parse
from fedcross.tasks.base import Partition, Task
from fedcross.tasks.models import create

if TYPE_CHECKING:
    import torch
    from torch import nn

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Options:
    """What to analyse: rounds (all kept if empty), slots of models, test examples, and indices of test images."""

    rounds: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    examples: int = 500
    images: tuple[int, ...] = ()


@dataclass(frozen=True)
class RecordedExchange:
    """The uploads of one exchange: models, and the clients that trained them, by slot."""

    round: int
    exchange: int
    models: Mapping[int, Arrays]
    clients: Mapping[int, int]


class Subject:
    """A run folder with snapshots.

    Parameters
    ----------
    folder : Path
        Written by ``fedcross`` with ``snapshots.rounds=[...]``.
    root : Path or None
        Folder of the data sets; that of the run if None.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        self.folder = folder
        try:
            plain = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "config.yaml"), resolve=False)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{folder}: no .hydra/config.yaml. Give the output folder of a run.") from error
        except PermissionError:  # the command line says what to do about it
            raise
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise DataError(f"{folder}: .hydra/config.yaml cannot be read ({type(error).__name__}).") from error
        self.config: dict[str, Any] = {str(k): v for k, v in plain.items()} if isinstance(plain, dict) else {}
        if root is not None and "root" in self.config.get("task", {}):
            self.config["task"]["root"] = str(root)
        self.seed = int(self.config["seed"])

    @property
    def name(self) -> str:
        """Short description of the run, for titles."""
        where = self.config["partition"]
        beta = f" beta={where['beta']}" if "beta" in where else ""
        return f"{self.config['method']['name']}, {self.config['task']['name']}, {where['name']}{beta}"

    # ---- what the run used -----------------------------------------------------------------------------------

    @cached_property
    def task(self) -> Task:
        """The data set."""
        module, params = self._part("task", "fedcross.tasks")
        task: Task = module.load(params)
        return task

    @cached_property
    def partition(self) -> Partition:
        """Who owns what."""
        module, params = self._part("partition", "fedcross.tasks.partition")
        partition: Partition = module.split(params, self.task, self.seed)
        return partition

    def network(self, arrays: Arrays) -> nn.Module:
        """Return the configured network, as the method wraps it, with weights `arrays`, in evaluation mode."""
        from fedcross.strategies.round.registry import method_class
        from fedcross.tasks.models.weights import load_arrays

        part = {name: value for name, value in self.config["model"].items() if name != "module"}
        model: nn.Module = create(str(self.config["model"].get("module", part["name"])), part, self.task, self.seed)
        self._narrow(model)
        kind = method_class(str(self.config["method"].get("module", self.config["method"]["name"])))
        params = self._params("method", kind.Params)
        model = kind.network(model, params, self.seed)
        if set(arrays) > set(model.state_dict()):  # a final model, with arrays that only its evaluation needs
            model = kind.evaluation_network(model, params)
        try:
            load_arrays(model, arrays)
        except RuntimeError as error:
            raise DataError(
                f"{self.folder}: the kept weights do not fit model {part['name']}. Was the configuration edited?"
            ) from error
        return model.eval()

    def _narrow(self, model: nn.Module) -> None:
        """Leave only the part of `model` that the run trained in its ``state_dict``."""
        from fedcross.tasks.models.part import narrow

        train = self.config.get("train", {})
        only, base = train.get("only") or [], train.get("base")
        if only:
            root = Path(str(self.config.get("data_root", "data")))
            narrow(model, [only] if isinstance(only, str) else only, root / base if base else None)

    def _part(self, group: str, package: str) -> tuple[Any, Settings]:
        module = find(package, str(self.config[group].get("module", self.config[group]["name"])), group)
        return module, self._params(group, module.Params)

    def _params(self, group: str, kind: type[Settings]) -> Settings:
        omitted = {"module"} if "name" in kind.model_fields else {"module", "name"}
        values = {name: value for name, value in self.config[group].items() if name not in omitted}
        faults: list[str] = []
        params = parse(kind, values, group, faults)
        if params is None:
            raise ConfigError(faults)
        return params

    # ---- what the run kept -----------------------------------------------------------------------------------

    def rounds(self, wanted: Sequence[int] = ()) -> list[int]:
        """Return the rounds that were kept, or those of them that are `wanted`.

        Raises
        ------
        DataError
            If there is none, or a wanted round is missing.
        """
        names = (path.stem.split("-") for path in self._files("round-*.safetensors"))
        kept = sorted({int(name[1]) for name in names if name[1].isdigit()})
        if not kept:
            raise DataError(f"{self.folder}: no snapshots. Run it with snapshots.rounds=[1,10,100], for example.")
        if missing := sorted(set(wanted) - set(kept)):
            raise DataError(f"{self.folder}: no snapshot of round {missing}. There are {kept}.")
        return sorted(wanted) if wanted else kept

    def exchanges(self, number: int) -> list[RecordedExchange]:
        """Return the exchanges of round `number`, in order."""
        found = [_read_exchange(path) for path in self._files(f"round-{number:06d}-exchange-*.safetensors")]
        return sorted(found, key=lambda one: one.exchange)

    def global_model(self, number: int) -> Arrays:
        """Return the global model after round `number`."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.folder / "snapshots" / f"round-{number:06d}.safetensors"
        if not path.exists():
            raise DataError(f"{path}: no such snapshot. The run may have been cut off in round {number}.")
        try:
            return dict(load_file(path))
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(f"{path}: damaged ({error}).") from error

    def _files(self, pattern: str) -> list[Path]:
        return sorted((self.folder / "snapshots").glob(pattern))

    # ---- test examples ---------------------------------------------------------------------------------------

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


def _read_exchange(path: Path) -> RecordedExchange:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            models: dict[int, Arrays] = {}
            for key in file.keys():  # noqa: SIM118 - not a dict
                slot, name = key.split("/", 1)
                models.setdefault(int(slot), {})[name] = file.get_tensor(key)
        clients = {int(one["slot"]): int(one["client"]) for one in json.loads(header["uploads"])}
        return RecordedExchange(int(header["round"]), int(header["exchange"]), dict(sorted(models.items())), clients)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a snapshot of uploads ({error}).") from error
