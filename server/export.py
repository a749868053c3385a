"""Models of a run for use elsewhere: rebuilt from a checkpoint, written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fedcross.core.errors import StorageError
from fedcross.core.overrides import quote, shown
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.evaluation import write_model
from fedcross.server.network_files import file_of
from fedcross.server.run_folder import saved_overrides, writing
from fedcross.server.run_paths import with_paths
from fedcross.server.widths import corners_for
from fedcross.strategies.method import Start
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.strategies.round.driver import Driver
    from fedcross.tasks.base import Task
    from fedcross.tasks.models.width import Width

#: File format -> the end of the file's name.
SUFFIX = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt"}


def export(
    run: Path,
    number: int | None = None,
    model: int | None = None,
    out: Path | None = None,
    kind: str = "safetensors",
    data_root: str | None = None,
    width: float | str | None = None,
) -> Path:
    """Write a model of `run`; return the file's path.

    Parameters
    ----------
    run : Path
        A run's folder.
    number : int, optional
        The round of the checkpoint; None for the newest.
    model : int, optional
        Index of a middleware model of the pool, from 0; None for the global model.
    out : Path, optional
        The file to write; by default ``model-round-NUMBER...`` in `run`.
    kind : {"safetensors", "onnx", "torchscript"}
        The trained weights, or the whole network from prepared inputs (batch, ...) to scores (batch, classes).
    data_root : str, optional
        Folder of the data sets, from which a network's shape of inputs comes.
    width : float or str, optional
        The global model of this width, as reports name it (``0.4@2`` keeps two groups whole); None for the widest.

    Raises
    ------
    StorageError
        If there is no such run, round, model or width, or `out` cannot be written.
    ConfigError
        If torch's exporter cannot write the network.
    """
    if model is not None and width is not None:
        raise StorageError("--model and --width: a middleware model has its own width. Give one of them.")
    number, driver, identity = _checkpoint(run, number)
    arrays, size = _global(driver, width, run) if model is None else _middleware(driver, model, run)
    suffix = f"-{model}" if model is not None else f"-width-{width}" if width is not None else ""
    path = out or run / f"model-round-{number:06d}{suffix}{SUFFIX[kind]}"
    with writing(path, "or choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "safetensors":
            write_model(path, arrays, identity.get("tied", {}))
        else:
            rebuilt, config = _network(run, data_root, size)
            _load(rebuilt, arrays, run)
            path.write_bytes(file_of(kind, rebuilt, _task(config)))
    return path


def network(run: Path, data_root: str | None = None, width: float | str | None = None) -> nn.Module:
    """Return the network of `run` with its final global weights, or those of the newest checkpoint.

    `width` names one of the widths of a run whose models have several, from the newest checkpoint.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    final, size = run / "model.safetensors", None
    if width is None and final.exists():
        try:
            arrays = load_file(final)
        except (OSError, SafetensorError, ValueError) as error:
            raise StorageError(f"{final}: damaged ({error}). fedcross resume={shown(run)} writes it again.") from error
    else:
        _, driver, _ = _checkpoint(run, None)
        arrays, size = _global(driver, width, run)
    model, _ = _network(run, data_root, size)
    _load(model, arrays, run)
    return model.eval()


# ---- what a run holds -------------------------------------------------------------------------------------------


def _checkpoint(run: Path, number: int | None) -> tuple[int, Driver, dict[str, Any]]:
    """Return a round, the driver in its state at the checkpoint of that round, and the run's identity."""
    checkpoints = Checkpoints(run)
    if not (rounds := checkpoints.rounds()):
        raise StorageError(f"{run}: no checkpoint here. Name the folder of a run after its first checkpoint.")
    if number is None:
        number, packed, identity = checkpoints.latest()
    elif number in rounds:
        packed, identity = checkpoints.load(number)
    else:
        kept = ", ".join(map(str, rounds))
        raise StorageError(f"--round {number}: {run} has checkpoints of round {kept}. See checkpoint.milestone.")
    config = config_of(run, None)
    spec, trained = packed.values["model"], tuple(packed.values["parameters"])
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()}
    corners = corners_for(config, _task(config)) if config.new_method().widths() else None
    start = Start(empty, trained, config.clients_per_round, config.rounds, config.seed, corners)
    driver = open_run(config.new_method(), start, RoundSettings.of(config, "", networked=False))
    checkpoints.restore(driver, packed, number)
    return number, driver, identity


def _global(driver: Driver, width: float | str | None, run: Path) -> tuple[Arrays, Width | None]:
    """Return the global model of `width`, and its width; of several with one ratio that with fewest whole groups."""
    if width is None:
        return driver.global_model(), None
    models = driver.evaluation().widths
    for size in sorted(models, key=lambda size: size.whole):
        if width in (size.text, f"{size.ratio:g}", size.ratio):
            return models[size], size
    known = ", ".join(size.text for size in models) or "one width"
    raise StorageError(f"width {width}: {run} has {known}. Name one of them, or leave it out.")


def _middleware(driver: Driver, model: int, run: Path) -> tuple[Arrays, Width | None]:
    pool = getattr(driver.state, "pool", None)
    if pool is None or not 0 <= model < len(pool):
        found = f"the middleware models 0 to {len(pool) - 1}" if pool is not None else "no middleware models"
        raise StorageError(f"--model {model}: {run} has {found}.")
    arrays: Arrays = pool.model(model)
    return arrays, pool.sizes[model] if driver.sized else None


def config_of(run: Path, data_root: str | None) -> RunConfig:
    """Return the checked configuration of `run`."""
    from fedcross.conf.schema import load

    given = [f"data_root={quote(data_root)}"] if data_root else []
    return load([*with_paths(run, saved_overrides(run), given), *given])


def _network(run: Path, data_root: str | None, size: Width | None) -> tuple[nn.Module, RunConfig]:
    """Return the network of `run` for evaluation, of `size` or of the global model, and the configuration."""
    from fedcross.tasks.models.width import Width

    config = config_of(run, data_root)
    widths = getattr(config.method, "widths", ())
    trained, _ = config.network(_task(config), width=size or (Width(max(widths)) if widths else None))
    return config.new_method().network(trained, deployed=True), config


def _load(model: nn.Module, arrays: Arrays, run: Path) -> None:
    from fedcross.tasks.models.weights import load_arrays

    try:
        load_arrays(model, arrays)
    except RuntimeError as error:
        raise StorageError(f"{run}: its weights do not fit its network ({error}). Was the model changed?") from error


def _task(config: RunConfig) -> Task:
    """Return the run's task, without examples where its settings say all about its inputs."""
    outline = getattr(config.module("task"), "outline", None)
    found: Task | None = outline(config.task) if outline else None
    return config.load_data().task if found is None else found
