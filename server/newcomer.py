"""``fedcross analyse RUN... onboard``: how fast a new client learns from the final global models of runs.

FedFusion, Fig. 4. The newcomer is one client more than the run had. It receives the final global model and trains alone
with the run's method. Its accuracy on its own test part is measured before training and after every local epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

    from fedcross.client.cache import RunCache
    from fedcross.strategies.objective import Visit

ABOUT = "accuracy of a new client over its local epochs, from the final models of runs"
#: Settings of a run that do not apply to its newcomer.
DROPPED = {"output", "resume", "data_root", "logger", "log", "serve", "engine"}


def onboard(runs: Sequence[Path], out: Path, epochs: int, changes: Sequence[str], client: int | None) -> list[Path]:
    """Train a newcomer for each run; write ``onboard.csv`` (run, method, epoch, accuracy) and ``onboard.png``.

    Parameters
    ----------
    runs : sequence of Path
        Folders of finished runs.
    out : Path
        Folder for the files.
    epochs : int
        Local epochs, each with the run's learning rate.
    changes : sequence of str
        Overrides added to the runs' own, such as ``data_root=DIR``.
    client : int, optional
        Partition id of the newcomer; the partition gets one client more if None.

    Raises
    ------
    ConfigError
        If the partition cannot have one more client and `client` is not given, or if clients of the method need more
        from the server than a model.
    StorageError
        If a run has no model, or `out` cannot be written.
    """
    import pandas as pd
    import seaborn
    from matplotlib.figure import Figure

    if epochs < 1:
        raise ConfigError(f"--epochs {epochs}: train at least 1 epoch.")
    parts = []
    for run in runs:
        method, curve = newcomer(run, epochs, changes, client)
        parts.append(pd.DataFrame({"run": str(run), "method": method, "epoch": range(epochs + 1), "accuracy": curve}))
    table = pd.concat(parts)
    figure = Figure(figsize=(7.6, 4.4), dpi=140, layout="constrained")
    axes = seaborn.lineplot(table, x="epoch", y="accuracy", hue="method", errorbar="sd", ax=figure.subplots())
    axes.set(xlabel="local epochs of the newcomer", ylabel="accuracy on its own test data")
    try:
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / "onboard.csv", index=False)
        figure.savefig(out / "onboard.png")
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return [out / "onboard.png", out / "onboard.csv"]


def newcomer(run: Path, epochs: int, changes: Sequence[str], client: int | None) -> tuple[str, list[float]]:
    """Return the run's method, and the accuracies in [0, 1] of its newcomer before and after every epoch."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from fedcross.client.cache import RunCache
    from fedcross.conf.schema import load
    from fedcross.server.run_folder import saved_overrides

    kept = [one for one in saved_overrides(run) if one.lstrip("+").split("=")[0] not in DROPPED]
    overrides = [*kept, *changes]
    config = load(overrides)
    if client is None:
        count = getattr(config.partition, "clients", None)
        if count is None:
            name = config.names["partition"]
            raise ConfigError(f"{run}: partition {name!r} has no number of clients to increase. Give --client.")
        client = int(count)
        config = load([*overrides, f"partition.clients={client + 1}"])
    cache = RunCache(config)
    try:
        arrays = load_file(run / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{run}: no final model ({error}). Name a finished run.") from error
    cache.net.load({name: arrays[name] for name in cache.net.names})
    own = [one.removeprefix("method.") for one in kept if one.startswith("method.")]
    return " ".join([config.names["method"], *own]), _train(cache, client, epochs)


def _train(cache: RunCache, client: int, epochs: int) -> list[float]:
    import torch

    from fedcross.client.cache import one_thread
    from fedcross.client.trainer import train
    from fedcross.core.randomness import key
    from fedcross.tasks.models.dropout import seed_dropout
    from fedcross.tasks.scoring import accuracy

    config = cache.config
    data = cache.data.client_test(client, cache.device)
    if data is None:
        data = cache.data.central.to(cache.device), torch.from_numpy(cache.data.task.test.y).to(cache.device)
    visit = _visit(cache, client)
    once = config.train.model_copy(update={"epochs": 1})
    with one_thread(cache.device):
        try:
            prepared = cache.objective.prepare(visit)
        except KeyError as error:
            name = config.names["method"]
            raise ConfigError(f"{name}: its clients receive {error} too, but a newcomer has only the model.") from error

        def predict(x: Tensor) -> Tensor:
            return cache.objective.predict(cache.net, cache.net.params, cache.net.buffers, x, prepared)

        curve = [accuracy(predict, *data)]
        for epoch in range(1, epochs + 1):
            visit = replace(visit, round=config.rounds + epoch)  # another order of the examples in every epoch
            seed_dropout(cache.net.module, key(config.seed, "dropout", visit.round, client, 0))
            trained = train(cache.net, cache.objective, visit, prepared, once, cache.data.task.augment)
            visit.momentum = trained.momentum
            curve.append(accuracy(predict, *data))
    return curve


def _visit(cache: RunCache, client: int) -> Visit:
    """Return the newcomer's visit: a client without any history."""
    from fedcross.client.request import examples
    from fedcross.strategies.objective import Visit

    config = cache.config
    inputs, y = examples(cache, client, config.rounds + 1)
    return Visit(
        net=cache.net,
        params={name: p.detach().clone() for name, p in cache.net.params.items()},
        buffers={name: b.clone() for name, b in cache.net.buffers.items()},
        extras={},
        config={},
        state={},
        inputs=inputs,
        y=y,
        client=client,
        round=config.rounds + 1,
        rounds=config.rounds,
        seed=config.seed,
        classes=cache.data.task.classes,
        lr=config.train.lr,
        augmented=cache.data.task.augment is not None,
    )
