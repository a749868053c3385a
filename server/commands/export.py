"""``fedcross export``: writes a model from a checkpoint of a run, finished or still running.

It needs neither the run's data nor its network: the checkpoint holds names and shapes of all weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import StorageError

if TYPE_CHECKING:
    from torch import nn

    from fedcross.strategies.pool.layout import Arrays
    from fedcross.strategies.round.base import Method
    from fedcross.strategies.round.federation import State

#: An active run deletes old checkpoints while they are read: how often to look again for the newest one.
ATTEMPTS = 3


def export(run: Path, number: int | None = None, model: int | None = None, out: Path | None = None) -> Path:
    """Write a model of `run` as ``safetensors`` with the names of its ``state_dict``; return the file's path.

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

    Raises
    ------
    StorageError
        If there is no such run, round or model (the message lists those that exist), or `out` cannot be written.
    """
    from fedcross.server.session import write_model

    number, state, identity = _checkpoint(run, number)
    method = _rebuilt(state, identity)
    arrays = method.evaluation_arrays() if model is None else _middleware(method, model, run)
    suffix = "" if model is None else f"-{model}"
    path = out or run / f"model-round-{number:06d}{suffix}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, arrays, method.tied)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error}). Choose another --out.") from error
    return path


def network(run: Path, data_root: str | None = None) -> nn.Module:
    """Return the network of `run` with the final global weights, or those of the newest checkpoint.

    Needs the run's data set, which determines the network's inputs and outputs; `data_root` is its folder.
    """
    from omegaconf import OmegaConf
    from safetensors.numpy import load_file

    from fedcross.conf.schema import load
    from fedcross.strategies.round.registry import method_class
    from fedcross.tasks.models.weights import load_arrays

    path = run / ".hydra" / "overrides.yaml"
    try:
        overrides = [str(o) for o in OmegaConf.load(path)]
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}). Name the folder of a run.") from error
    config = load([*overrides, *([f"data_root='{data_root}'"] if data_root else [])])
    kind = method_class(config.modules["method"])
    trained, _ = config.network(config.load_data().task)
    model = kind.evaluation_network(trained, config.method)
    final = run / "model.safetensors"
    if final.exists():
        arrays = load_file(final)
    else:
        _, state, identity = _checkpoint(run, None)
        arrays = _rebuilt(state, identity).evaluation_arrays()
    load_arrays(model, arrays)
    return model.eval()


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


def _rebuilt(state: State, identity: dict[str, Any]) -> Method:
    """Return the method in its state at the checkpoint, without network and data."""
    import numpy as np

    from fedcross.conf.compose import activate_plugins
    from fedcross.strategies.round.federation import Federation
    from fedcross.strategies.round.registry import method_class

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
    method.begin({name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()}, parameters)
    method.resume(state)
    return method


def _middleware(method: Method, model: int, run: Path) -> Arrays:
    pool = getattr(method, "pool", None)
    if pool is None:
        raise StorageError(f"--model {model}: {run} has no middleware models, {type(method).__name__} keeps one model.")
    if not 0 <= model < len(pool):
        raise StorageError(f"--model {model}: {run} has the middleware models 0 to {len(pool) - 1}.")
    arrays: Arrays = pool.model(model)
    return arrays


def main(arguments: Sequence[str]) -> int:
    """Write a model of a run; return the exit code."""
    parser = argparse.ArgumentParser("fedcross export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--round", type=int, help="round of a checkpoint (default: the newest)")
    parser.add_argument("--model", type=int, help="index of a middleware model, from 0 (default: the global model)")
    parser.add_argument("--out", type=Path, help="file to write (default: model-round-R.safetensors in RUN)")
    asked = parser.parse_args(arguments)
    print(export(asked.run, asked.round, asked.model, asked.out))
    return 0
