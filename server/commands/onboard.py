"""``fedcross onboard``: how fast a new client learns from the final global models of runs (FedFusion, Fig. 4).

The newcomer is one client more than the run had. It receives the final global model and trains alone with the run's
method. Its accuracy on its own test part is measured before training and after every local epoch. It receives the same
arrays as any client: with FedFusion, its frozen extractor is the received one, so E_g = E_l at first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.strict_json import dumps
from fedcross.server.commands.options import not_negative, share

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedcross.client.workshop import Workshop
    from fedcross.conf.schema import RunConfig
    from fedcross.strategies.parts.objective import Visit

#: Settings of a run that do not apply to its newcomer.
DROPPED = {"output", "resume", "data_root", "logger", "log", "serve", "engine"}


@dataclass(frozen=True)
class Newcomer:
    """The result of one run's newcomer.

    Attributes
    ----------
    run : str
        The run's folder.
    label : str
        The method and its settings, as in the run's overrides.
    seed, client : int
        The run's seed; the newcomer's partition id.
    examples : int
        Number of examples that it trained on in each epoch.
    accuracy : list of float
        In [0, 1], on its own test part: before training, then after epoch 1, 2, ...
    """

    run: str
    label: str
    seed: int
    client: int
    examples: int
    accuracy: list[float]

    def converged(self, tolerance: float) -> int:
        """Return the first epoch whose accuracy is within `tolerance` of the best of all epochs."""
        best = max(self.accuracy)
        return next(epoch for epoch, value in enumerate(self.accuracy) if value >= best - tolerance)

    def reached(self, target: float) -> int | None:
        """Return the first epoch whose accuracy is at least `target`, None if there is none."""
        return next((epoch for epoch, value in enumerate(self.accuracy) if value >= target), None)


def onboard(run: Path, epochs: int, changes: Sequence[str] = (), client: int | None = None) -> Newcomer:
    """Train a newcomer from the final global model of `run`.

    Parameters
    ----------
    run : Path
        Folder of a finished run.
    epochs : int
        Local epochs.
    changes : sequence of str
        Overrides on top of the run's (``data_root=...``, ``train.examples=1000``, another partition).
    client : int, optional
        Partition id of the newcomer. If not given, the partition gets one more client, which is the newcomer.

    Notes
    -----
    The newcomer uses the run's initial learning rate without decay (the paper does not specify it). With one more
    client, the partition divides the data anew, so the newcomer's examples may have belonged to another client during
    the run. With permuted pixels, the newcomer has a permutation that no client of the run had.

    Raises
    ------
    ConfigError
        If the partition cannot have one more client and `client` is not given, or if clients of the method need more
        from the server than a model.
    StorageError
        If the run has no model or configuration.
    """
    from fedcross.client.workshop import Workshop
    from fedcross.conf.schema import load

    overrides = [*_overrides(run), *changes]
    config = load(overrides)
    if client is None:
        count = getattr(config.partition, "clients", None)
        if count is None:
            raise ConfigError(
                f"{run}: partition {config.names['partition']!r} has no number of clients to increase. "
                "Choose the newcomer with --client, and its data with --set."
            )
        client = int(count)
        config = load([*overrides, f"partition.clients={client + 1}"])
    shop = Workshop(config)
    arrays = _model(run / "model.safetensors", shop.net.names)
    return Newcomer(str(run), _label(overrides, config), config.seed, client, *_train(shop, arrays, client, epochs))


def _train(shop: Workshop, arrays: dict[str, np.ndarray], client: int, epochs: int) -> tuple[int, list[float]]:
    """Return the number of examples of the newcomer and its accuracies before and after every epoch."""
    from fedcross.client.trainer import train
    from fedcross.client.workshop import one_thread
    from fedcross.core.randomness import key
    from fedcross.tasks.models.dropout import seed_dropout
    from fedcross.tasks.scoring import accuracy

    config = shop.config
    data = shop.data.client_test(client, shop.device)
    if data is None:
        import torch

        data = shop.data.central.to(shop.device), torch.from_numpy(shop.data.task.test.y).to(shop.device)
    shop.net.load(arrays)
    visit = _visit(shop, client)
    once = config.train.model_copy(update={"epochs": 1})
    with one_thread(shop.device):
        try:
            prepared = shop.objective.prepare(visit)
        except KeyError as error:
            name = config.names["method"]
            raise ConfigError(
                f"{name}: its clients receive {error} besides the model, but a newcomer has only the model."
            ) from error

        def predict(x: Tensor) -> Tensor:
            return shop.objective.predict(shop.net, shop.net.params, shop.net.buffers, x, prepared)

        curve = [accuracy(predict, *data)]
        for epoch in range(1, epochs + 1):
            visit = replace(visit, round=config.rounds + epoch)  # another order of the examples in every epoch
            seed_dropout(shop.net.module, key(config.seed, "dropout", visit.round, client, 0))
            trained = train(shop.net, shop.objective, visit, prepared, once, shop.data.task.augment)
            visit.momentum = trained.momentum
            curve.append(accuracy(predict, *data))
    return len(visit.y), curve


def _visit(shop: Workshop, client: int) -> Visit:
    """Return the newcomer's visit: a client without any history."""
    from fedcross.client.visit import examples
    from fedcross.strategies.parts.objective import Visit

    config = shop.config
    inputs, y = examples(shop, client, config.rounds + 1)
    return Visit(
        net=shop.net,
        params={name: p.detach().clone() for name, p in shop.net.params.items()},
        buffers={name: b.clone() for name, b in shop.net.buffers.items()},
        extras={},
        config={},
        state={},
        inputs=inputs,
        y=y,
        client=client,
        round=config.rounds + 1,
        rounds=config.rounds,
        seed=config.seed,
        classes=shop.data.task.classes,
        lr=config.train.lr,
        augmented=shop.data.task.augment is not None,
    )


def _overrides(run: Path) -> list[str]:
    """Return the overrides of `run` that also apply to its newcomer."""
    from fedcross.server.run_folder import saved_overrides

    return [one for one in saved_overrides(run) if one.lstrip("+").split("=")[0] not in DROPPED]


def _model(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays called `names` of a run's global model; arrays that only its evaluation needs are left out."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path}: not the final model of this method ({error}). Name a finished run.") from error


def _label(overrides: Sequence[str], config: RunConfig) -> str:
    """Return the method with its own settings, as in the overrides."""
    given = [o.lstrip("+") for o in overrides]
    chosen = [o.removeprefix("method=") for o in given if o.startswith("method=")]
    settings = [o.removeprefix("method.") for o in given if o.startswith("method.")]
    return " ".join([chosen[-1] if chosen else config.names["method"], *settings])


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross onboard``."""
    line = argparse.ArgumentParser(
        prog="fedcross onboard",
        description="How many local epochs a new client needs, starting from the final global models of runs.",
    )
    line.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folders of finished runs")
    line.add_argument("--out", type=Path, default=Path("onboard"), metavar="FOLDER", help="default: onboard")
    line.add_argument("--epochs", type=int, default=20, help="local epochs to train (default: 20)")
    line.add_argument("--client", type=int, help="partition id of the newcomer (default: one client more)")
    line.add_argument(
        "--tolerance",
        type=not_negative,
        default=0.005,
        help="converged: at most this far below the best accuracy (default: 0.005)",
    )
    line.add_argument("--target", nargs="+", type=share, default=[], metavar="SHARE", help="accuracies to reach")
    line.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="OVERRIDE",
        help="settings added to the runs' own, such as data_root=DIR",
    )
    return line


def write(newcomers: Sequence[Newcomer], tolerance: float, targets: Sequence[float], out: Path) -> Path:
    """Write ``onboard.json`` into `out` and return its path."""
    from fedcross.server.accounting import write_atomically

    entries = [
        {
            **asdict(newcomer),
            "converged": newcomer.converged(tolerance),
            "reached": {str(target): newcomer.reached(target) for target in targets},
        }
        for newcomer in newcomers
    ]
    path = out / "onboard.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = dumps({"tolerance": tolerance, "targets": list(targets), "newcomers": entries}, indent=1)
        write_atomically(path, f"{text}\n".encode())
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return path


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross onboard``; return the exit code (0, or 2 for wrong use)."""
    options = parser().parse_args(arguments)
    if options.epochs < 1:
        raise ConfigError(f"--epochs {options.epochs}: train at least 1 epoch.")
    newcomers = []
    for run in options.runs:
        newcomers.append(onboard(run, options.epochs, options.set, options.client))
        print(f"{run}: {100 * newcomers[-1].accuracy[-1]:.2f} % after {options.epochs} epochs", file=sys.stderr)
    path = write(newcomers, options.tolerance, options.target, options.out)
    from fedcross.analysis.onboarding import write_report

    print(write_report(path))
    print(f"Written to {options.out}", file=sys.stderr)
    return 0
