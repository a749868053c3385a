"""``fedcross export``: writes a model from a checkpoint of a run, finished or still running.

``safetensors`` needs neither the run's data nor its network: the checkpoint holds names and shapes of all weights. ONNX
and TorchScript hold the network too, so they need its inputs and outputs: from the data set, or where that is not
there, from the settings of a task that have them (``task.shape`` and ``task.classes`` of arrays, ``task.classes`` of
folders).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import StorageError
from fedcross.core.overrides import shown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedcross.conf.schema import RunConfig
    from fedcross.strategies.pool.layout import Arrays
    from fedcross.strategies.round.base import Method
    from fedcross.strategies.round.federation import State
    from fedcross.tasks.base import Task
    from fedcross.tasks.models.slicing import Size

#: An active run deletes old checkpoints while they are read: how often to look again for the newest one.
ATTEMPTS = 3


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
        The file to write; None for ``model-round-NUMBER.safetensors`` (``model-round-NUMBER-MODEL...``) in `run`.
    kind : {"safetensors", "onnx", "torchscript"}
        ``safetensors`` holds the trained weights, with the names of the ``state_dict``. The others hold the whole
        network, from prepared inputs (batch, ...) to class scores (batch, classes), for any size of batch.
    data_root : str, optional
        Folder of the data sets; only for ONNX and TorchScript.
    width : float or str, optional
        The global model of this width, where the run has several, or of this size as reports name it: ``0.4@2`` keeps
        the first two groups of channels whole. None for the widest; of several sizes of one width (AdaptiveFL) a number
        means that with the fewest whole groups.

    Raises
    ------
    StorageError
        If there is no such run, round or model (the message lists those that exist), or `out` cannot be written.
    ConfigError
        If torch's exporter cannot write the network.
    """
    from fedcross.server.commands.export_notes import notes
    from fedcross.server.commands.formats import SUFFIX, write
    from fedcross.server.model_file import write_model

    number, state, identity = _checkpoint(run, number)
    method = _rebuilt(state, identity, run)
    if model is not None and width is not None:
        raise StorageError("--model and --width: a middleware model has its own width. Give one of them.")
    arrays, size = _global(method, width, run) if model is None else _middleware(method, model, run)
    suffix = f"-{model}" if model is not None else f"-width-{size.text}" if width is not None else ""
    path = out or run / f"model-round-{number:06d}{suffix}{SUFFIX[kind]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "safetensors":
            write_model(path, arrays, method.tied)
        else:
            rebuilt, config = _network(run, data_root, identity, size)
            load_into(rebuilt, arrays, run)
            write(kind, rebuilt, partial(_inputs, config), path, notes(_task(config)))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error}). Choose another --out.") from error
    return path


def network(run: Path, data_root: str | None = None, width: float | str | None = None) -> nn.Module:
    """Return the network of `run` with the final global weights, or those of the newest checkpoint.

    Needs the network's inputs and outputs, from the run's data set (in the folder `data_root`) or its settings. `width`
    is for a run whose models have several: it names one of them, from the newest checkpoint.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    final, identity, size = run / "model.safetensors", None, None
    if width is None and final.exists():
        try:
            arrays = load_file(final)
        except (OSError, SafetensorError, ValueError) as error:
            raise StorageError(f"{final}: damaged ({error}). fedcross resume={shown(run)} writes it again.") from error
    else:
        _, state, identity = _checkpoint(run, None)
        arrays, size = _global(_rebuilt(state, identity, run), width, run)
    model, _ = _network(run, data_root, identity, size)
    load_into(model, arrays, run)
    return model.eval()


def load_into(model: nn.Module, arrays: Arrays, run: Path) -> None:
    """Load the weights of `run` into its network."""
    from fedcross.tasks.models.weights import load_arrays

    try:
        load_arrays(model, arrays)
    except RuntimeError as error:
        raise StorageError(f"{run}: its weights do not fit its network ({error}). Was the model changed?") from error


def _network(
    run: Path, data_root: str | None, identity: dict[str, Any] | None, size: Size | None = None
) -> tuple[nn.Module, RunConfig]:
    """Return the network of `run` with its initial weights, for evaluation, and its configuration.

    It is of `size`, or of that of the run's global model.
    """
    from fedcross.conf.schema import load
    from fedcross.core.overrides import quote
    from fedcross.server.identity import check_base
    from fedcross.server.places import added
    from fedcross.server.run_folder import saved_overrides
    from fedcross.strategies.round.registry import method_class

    given = [f"data_root={quote(data_root)}"] if data_root else []
    config = load([*added(run, saved_overrides(run), given), *given])
    trained, base = config.network(_task(config))
    if identity is not None:
        check_base(identity, base)
    fitting = method_class(config.modules["method"]).evaluation_network(trained, config.method)
    return _sliced(fitting, config, size), config


def _sliced(network: nn.Module, config: RunConfig, size: Size | None) -> nn.Module:
    """Return the slice of `network`; without a size, that of the run's widest models."""
    from fedcross.server.slices import plan_for
    from fedcross.tasks.models.slicing import Size, cut

    task = _task(config)
    if (plan := plan_for(config, network, task)) is None:
        return network
    widths = getattr(config.method, "widths", ())
    return cut(network, plan, size or Size(max(widths, default=1.0)), task)


def _task(config: RunConfig) -> Task:
    """Return the run's task, without examples if its data are not here and the settings say all about its inputs."""
    outline = getattr(config.module("task"), "outline", None)
    found: Task | None = outline(config.task) if outline else None
    return config.load_data().task if found is None else found


def _inputs(config: RunConfig, count: int) -> Tensor:
    """Return prepared inputs of the run's task, (count, ...): its first test inputs, random ones if it has none."""
    import numpy as np

    task = _task(config)
    raw = task.test.x[:count]
    if len(raw) < count:
        draws, shape = np.random.default_rng(0), (count, *task.shape)
        raw = draws.integers(0, task.vocabulary or 256, shape) if raw.dtype.kind in "iu" else draws.random(shape)
        raw = raw.astype(task.test.x.dtype)
    found: Tensor = task.prepare(raw)
    return found


def _checkpoint(run: Path, number: int | None) -> tuple[int, State, dict[str, Any]]:
    from fedcross.server.checkpoint import Checkpoints

    if not run.is_dir():
        raise StorageError(f"{run}: no such run folder. Name the folder of a run.")
    checkpoints = Checkpoints(run)
    for attempt in range(ATTEMPTS):
        rounds = checkpoints.rounds()
        if not rounds:
            raise StorageError(f"{run}: no checkpoint here. A run writes its first one after checkpoint.every rounds.")
        if number is not None and number not in rounds:
            kept = ", ".join(map(str, rounds))
            raise StorageError(
                f"--round {number}: {run} has no checkpoint of that round, only of round {kept}. checkpoint.keep and "
                "checkpoint.milestone set which ones stay."
            )
        try:
            return checkpoints.latest() if number is None else (number, *checkpoints.load(number))
        except StorageError:
            if attempt == ATTEMPTS - 1 or checkpoints.rounds() == rounds:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _rebuilt(state: State, identity: dict[str, Any], run: Path) -> Method:
    """Return the method in its state at a checkpoint of `run`, without network and data."""
    import numpy as np

    from fedcross.conf.compose import activate_plugins
    from fedcross.server.checkpoint import resume
    from fedcross.strategies.round.federation import Federation
    from fedcross.strategies.round.registry import method_class
    from fedcross.tasks.models.slicing.plan import Plan

    activate_plugins()
    config = identity["config"]
    try:
        spec, parameters = state.values["_model"], state.values["_parameters"]
        kind = method_class(identity["module"])
    except KeyError as error:
        raise StorageError(
            f"this checkpoint has no {error}: an older version wrote it. Resume the run once to update it."
        ) from error
    federation = Federation(seed=config["seed"], clients_per_round=config["clients_per_round"])
    method = kind(kind.Params.model_validate(config["method"]), federation)
    if "_slices" in state.values:
        method.plan = Plan.of_plain({**state.values["_slices"], "scaled": identity.get("scaled", ())})
    method.begin({name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()}, parameters)
    resume(method, state, run)
    return method


def _global(method: Method, width: float | str | None, run: Path) -> tuple[Arrays, Size]:
    """Return the global model of `width`, and its size."""
    models = method.slice_models()
    if width is None:
        return method.evaluation_arrays(), method.global_size
    if (size := _named(list(models), width)) is None:
        known = ", ".join(size.text for size in models)
        told = f"has the widths {known}. Name one of them." if known else "has models of one size. Leave the width out."
        raise StorageError(f"width {width}: {run} {told}")
    return models[size], size


def _named(sizes: Sequence[Size], width: float | str) -> Size | None:
    """Return the size with the name `width` in reports, else the one of this width with the fewest whole groups."""
    from fedcross.tasks.models.slicing.plan import TOLERANCE

    for size in sizes:
        if size.text == width:
            return size
    try:
        number = float(width)
    except ValueError:
        return None
    return min((size for size in sizes if abs(size.width - number) < TOLERANCE), key=lambda s: s.start, default=None)


def _middleware(method: Method, model: int, run: Path) -> tuple[Arrays, Size]:
    pool = getattr(method, "pool", None)
    if pool is None:
        raise StorageError(f"--model {model}: {run} has no middleware models, {type(method).__name__} keeps one model.")
    if not 0 <= model < len(pool):
        raise StorageError(f"--model {model}: {run} has the middleware models 0 to {len(pool) - 1}.")
    arrays: Arrays = pool.model(model)
    return arrays, pool.sizes[model] if method.plan is not None else method.global_size


def main(arguments: Sequence[str]) -> int:
    """Write a model of a run; return the exit code."""
    parser = argparse.ArgumentParser("fedcross export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--round", type=int, help="round of a checkpoint (default: the newest)")
    parser.add_argument("--model", type=int, help="index of a middleware model, from 0 (default: the global model)")
    parser.add_argument("--width", help="the global model of this width, as 0.4 or 0.4@2 (default: the widest)")
    parser.add_argument("--out", type=Path, help="file to write (default: model-round-R.safetensors in RUN)")
    parser.add_argument(
        "--format",
        choices=("safetensors", "onnx", "torchscript"),
        default="safetensors",
        help="the weights (default), or the whole network for another runtime",
    )
    parser.add_argument("--data-root", help="folder of the data sets, for onnx and torchscript (default: the run's)")
    asked = parser.parse_args(arguments)
    path = export(asked.run, asked.round, asked.model, asked.out, asked.format, asked.data_root, asked.width)
    print(path)
    width = asked.width if asked.model is None else _width_of(asked.run, asked.round, asked.model)
    print(f"\n{_loading(asked.run, path, asked.format, asked.data_root, width)}", file=sys.stderr)
    return 0


def _width_of(run: Path, number: int | None, model: int) -> str | None:
    """Return the name of a middleware model's size; None if it is a full one."""
    _, state, identity = _checkpoint(run, number)
    _, size = _middleware(_rebuilt(state, identity, run), model, run)
    return None if size.width >= 1 else size.text


def _loading(run: Path, path: Path, kind: str, data_root: str | None, width: str | None) -> str:
    """Return Python code that loads the file; on stderr, so that stdout is the path alone."""
    from fedcross.server.commands.formats import loading_network, loading_weights

    if kind == "safetensors":
        return loading_weights(path, run, data_root, width)
    _, config = _network(run, data_root, None)
    return loading_network(kind, path, _inputs(config, 1))
