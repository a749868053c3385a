"""Runs FedAvg rounds in another framework, in that framework's own environment. Imports nothing of fedcross.

::

    python peer_rounds.py pfl FOLDER

FOLDER holds ``work.json`` and ``data.npz``; the seconds of each round go to ``seconds.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Work = dict[str, Any]


def network(name: str) -> nn.Module:
    """Return the CNN of the workload, as :func:`benchmarks.engine.network` has it."""
    widths, hidden = {"lenet5": ((6, 16), (120, 84)), "cnn_w": ((32, 64), (512,))}[name]
    parts: list[nn.Module] = []
    for before, width in zip((3, widths[0]), widths):
        parts += [nn.Conv2d(before, width, 5), nn.ReLU(), nn.MaxPool2d(2)]
    parts.append(nn.Flatten())
    size = widths[1] * 25
    for width in hidden:
        parts += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*parts, nn.Linear(size, 10))


def load(folder: Path, work: Work) -> tuple[Tensor, Tensor]:
    """Return the images, float and about normal, and the labels of the clients that a round draws."""
    with np.load(folder / "data.npz") as data:
        n = work["drawn"] * work["examples"]
        return (torch.from_numpy(data["x"][:n]).float() - 127.5) / 73.9, torch.from_numpy(data["y"][:n])


class Clock:
    """Notes the seconds of each round."""

    def __init__(self, folder: Path) -> None:
        self.file, self.start = folder / "seconds.json", time.perf_counter()
        self.times: list[float] = []

    def round(self) -> int:
        """Note the end of a round; return how many there were."""
        now = time.perf_counter()
        self.times.append(now - self.start)
        self.start = now
        if os.environ.get("RANK", "0") == "0":
            self.file.write_text(json.dumps(self.times))
        return len(self.times)


def pfl(folder: Path, work: Work) -> None:
    """pfl-research: SimulatedBackend and FederatedAveraging, one process per core through torchrun."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(work["model"])

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:  # noqa: A002 - pfl's name
            self.train(not eval)
            return functional.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:  # noqa: A002
            return {}

    x, y = load(folder, work)
    n, drawn = work["examples"], iter(range(10**9))

    def user(identity: int) -> Any:
        part = slice(identity * n, (identity + 1) * n)
        return Dataset((x[part], y[part]), user_id=str(identity))

    class Timed(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            """Note the end of a round."""
            clock.round()
            return False, Metrics()

    module = Model()
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
    local = NNTrainHyperParams(
        local_num_epochs=work["epochs"], local_learning_rate=work["lr"], local_batch_size=work["batch"]
    )
    model = PyTorchModel(
        module, lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=work["momentum"]), optimiser
    )
    data = FederatedDataset(user, lambda: next(drawn) % work["drawn"])
    rounds = NNAlgorithmParams(
        central_num_iterations=work["rounds"],
        evaluation_frequency=10**7,
        train_cohort_size=work["drawn"],
        val_cohort_size=0,
    )
    backend = SimulatedBackend(training_data=data, val_data=data)
    clock = Clock(folder)
    FederatedAveraging().run(
        rounds, backend, model, local, NNEvalHyperParams(local_batch_size=1000), callbacks=[Timed()]
    )


def fluke(folder: Path, work: Work) -> None:
    """fluke: FedAVG, one process with a thread per core, as it runs by itself."""
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter

    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    FlukeENV().set_inmemory(True)
    x, y = load(folder, work)
    client = {"batch_size": work["batch"], "local_epochs": work["epochs"], "loss": "CrossEntropyLoss"}
    client |= {"optimizer": {"name": "SGD", "lr": work["lr"], "momentum": work["momentum"]}}
    client |= {"scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1}}
    algorithm = FedAVG(
        n_clients=work["drawn"],
        data_splitter=DataSplitter(DataContainer(x, y, x[:50], y[:50], 10), distribution="iid", client_split=0.0),
        hyper_params={"client": client, "server": {"weighted": True}, "model": network(work["model"])},
    )
    clock = Clock(folder)
    for _ in range(work["rounds"]):
        algorithm.run(n_rounds=1, eligible_perc=1.0, finalize=False)
        clock.round()


def blazefl(folder: Path, work: Work) -> None:
    """BlazeFL: its own FedAvg on its thread pool, two threads of one torch thread each; its SGD has no momentum."""
    from blazefl.contrib import fedavg
    from torch.utils.data import DataLoader, TensorDataset

    class Data:
        def get_dataloader(self, type_: str, cid: int | None, batch_size: int, generator: Any) -> Any:
            part = slice((cid or 0) * work["examples"], ((cid or 0) + 1) * work["examples"])
            return DataLoader(TensorDataset(x[part], y[part]), batch_size, shuffle=True, generator=generator)

    class Models:
        def select_model(self, model_name: str) -> nn.Module:
            return network(model_name)

    x, y = load(folder, work)
    common = {"model_selector": Models(), "model_name": work["model"], "dataset": Data(), "device": "cpu", "seed": 1}
    common |= {"num_clients": work["drawn"], "batch_size": work["batch"]}
    server = fedavg.FedAvgBaseServerHandler(**common, global_round=10**6, sample_ratio=1.0)
    clients = fedavg.FedAvgThreadPoolClientTrainer(**common, epochs=work["epochs"], lr=work["lr"], num_parallels=2)
    clock = Clock(folder)
    for _ in range(work["rounds"]):
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        clock.round()


if __name__ == "__main__":
    home = Path(sys.argv[2])
    {"pfl": pfl, "fluke": fluke, "blazefl": blazefl}[sys.argv[1]](home, json.loads((home / "work.json").read_text()))
