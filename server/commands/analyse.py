"""``fedcross analyse``: plots of the models of runs: t-SNE, Grad-CAM, loss surfaces, and how fast a newcomer learns.

A newcomer (FedFusion, Fig. 4) is one client more than the run had. It receives the final global model and trains alone
with the run's method. Its accuracy on its own test part is measured before training and after every local epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from fedcross.analysis.subject import KINDS, Options, analyse
from fedcross.client.cache import RunCache
from fedcross.client.request import examples, one_thread
from fedcross.client.trainer import train
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.randomness import key
from fedcross.server.run_folder import saved_overrides
from fedcross.strategies.objective import Visit
from fedcross.tasks.models.dropout import seed_dropout
from fedcross.tasks.scoring import accuracy

ABOUT = "accuracy of a new client over its local epochs, from the final models of runs"
#: Settings of a run that do not apply to its newcomer.
DROPPED = {"output", "resume", "logger", "log", "serve", "engine"}


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross analyse``."""
    kinds = {**KINDS, "onboard": ABOUT}
    line = argparse.ArgumentParser(
        prog="fedcross analyse",
        description="Plots of the models of runs. cka, tsne, forgetting and gradcam need snapshots: "
        "fedcross ... snapshots.rounds=[1,10,100]. landscape and onboard take several finished runs.",
        epilog="kinds: " + "; ".join(f"{name}: {text}" for name, text in kinds.items()),
    )
    several: dict[str, Any] = {"nargs": "+", "default": []}
    line.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    line.add_argument("kind", choices=tuple(kinds), help="what to show")
    line.add_argument("--rounds", **several, type=int, metavar="N", help="rounds (default: all kept rounds)")
    line.add_argument("--slots", **several, type=int, metavar="I", help="single models, for tsne and gradcam")
    line.add_argument("--examples", type=int, default=500, metavar="N", help="test examples (default: 500)")
    line.add_argument("--images", **several, type=int, metavar="I", help="test images for gradcam")
    line.add_argument("--radius", type=_positive, default=1.0, help="landscape: half the length of each axis")
    line.add_argument("--points", type=int, default=21, help="landscape: points along each axis (default: 21)")
    line.add_argument("--seed", type=int, default=1, help="landscape: seed of the directions (default: 1)")
    line.add_argument("--epochs", type=int, default=20, help="onboard: local epochs (default: 20)")
    line.add_argument("--client", type=int, help="onboard: partition id of the newcomer (default: one client more)")
    line.add_argument("--set", **several, metavar="OVERRIDE", help="onboard: settings added to the runs'")
    line.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (default: that of the run)")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the files (default: 'analysis' in RUN)")
    return line


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross analyse``; return the exit code (0, or 2 for wrong use and for runs without snapshots)."""
    given = vars(parser().parse_args(arguments))
    runs, kind = given.pop("runs"), given.pop("kind")
    out = given.pop("out") or runs[0] / "analysis"
    epochs, client, changes = (given.pop(name) for name in ("epochs", "client", "set"))
    if kind == "onboard":
        written = onboard(runs, out, epochs, changes, client)
    else:
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        written = analyse(runs, kind, out, Options(**{**given, **lists}))
    print("\n".join(map(str, written)))
    return 0


def onboard(runs: Sequence[Path], out: Path, epochs: int, changes: Sequence[str], client: int | None) -> list[Path]:
    """Train a newcomer, partition `client`, for each run with overrides `changes`; write and return table and plot."""
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
    kept = [one for one in saved_overrides(run) if one.lstrip("+").split("=")[0] not in DROPPED]
    overrides = [*kept, *changes]
    config = load(overrides)
    if client is None:
        client = getattr(config.partition, "clients", None)
        if client is None:
            name = config.names["partition"]
            raise ConfigError(f"{run}: partition {name!r} has no number of clients to increase. Give --client.")
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
    config, net, task = cache.config, cache.net, cache.data.task
    data = cache.data.client_test(client, cache.device)
    if data is None:
        data = cache.data.central.to(cache.device), torch.from_numpy(task.test.y).to(cache.device)
    inputs, y = examples(cache, net, client, config.rounds + 1)
    params = {name: p.detach().clone() for name, p in net.params.items()}
    buffers = {name: b.clone() for name, b in net.buffers.items()}
    visit = Visit(  # of a client without any history
        net=net, params=params, buffers=buffers, extras={}, config={}, state={}, inputs=inputs, y=y, client=client,
        round=config.rounds + 1, rounds=config.rounds, seed=config.seed, classes=task.classes, lr=config.train.lr,
        augmented=task.augment is not None,
    )  # fmt: skip
    once = config.train.model_copy(update={"epochs": 1})
    with one_thread(cache.device):
        try:
            prepared = cache.objective.prepare(visit) if cache.objective.prepare else {}
        except KeyError as error:
            name = config.names["method"]
            raise ConfigError(f"{name}: its clients receive {error} too, but a newcomer has only the model.") from error

        def predict(x: Tensor) -> Tensor:
            return cache.objective.predict(net, net.params, net.buffers, x, prepared)

        curve = [accuracy(predict, *data)]
        for epoch in range(1, epochs + 1):
            visit = replace(visit, round=config.rounds + epoch)  # another order of the examples in every epoch
            seed_dropout(net.module, key(config.seed, "dropout", visit.round, client, 0))
            trained = train(net, cache.objective, visit, prepared, once, task.augment)
            visit.momentum = trained.momentum
            curve.append(accuracy(predict, *data))
    return curve
