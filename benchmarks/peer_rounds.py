"""Runs FedAvg rounds in another framework, one per request, in that framework's own environment.

::

    python peer_rounds.py pfl FOLDER

FOLDER holds ``work.json`` and ``data.npz``. A line on the pipe ``FOLDER/go`` requests a round; a line on
``FOLDER/done`` reports its end. Imports nothing of fedcross.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def network(name: str) -> nn.Module:
    """Return the workload's CNN as a textbook has it."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 5), nn.ReLU(), nn.MaxPool2d(2)]

    widths = {"lenet5": (6, 16, (120, 84)), "cnn_w": (32, 64, (512,))}[name]
    parts = [*block(3, widths[0]), *block(widths[0], widths[1]), nn.Flatten()]
    size = widths[1] * 25
    for hidden in widths[2]:
        parts += [nn.Linear(size, hidden), nn.ReLU()]
        size = hidden
    return nn.Sequential(*parts, nn.Linear(size, 10))


def load(folder: Path, work: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the images, float and about normal, and labels of those clients that a round draws from."""
    with np.load(folder / "data.npz") as data:
        n = work["drawn"] * work["examples"]
        return (torch.from_numpy(data["x"][:n]).float() - 127.5) / 73.9, torch.from_numpy(data["y"][:n])


class Turns:
    """Waits for requests and reports their end; only rank 0 communicates."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        if self.rank == 0:
            self._done = (folder / "done").open("w")
            self._go = (folder / "go").open()

    def done(self) -> None:
        """Report the end of a round."""
        if self.rank == 0:
            print("done", file=self._done, flush=True)

    def wait(self) -> bool:
        """Return False when there will be no more requests."""
        more = self.rank != 0 or bool(self._go.readline())
        if not more:
            os._exit(0)  # the other ranks wait in a collective call that never comes; torchrun ends them
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        return more


def pfl(folder: Path, work: dict[str, Any]) -> None:
    """pfl-research: SimulatedBackend, FederatedAveraging, one process per core through torchrun."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(work["model"])

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:  # noqa: A002 - pfl's name
            self.train(not eval)
            return functional.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:  # noqa: A002
            return {}

    x, y = load(folder, work)
    n = work["examples"]
    turns = Turns(folder)

    def user(identity: int) -> Any:
        part = slice(identity * n, (identity + 1) * n)
        return Dataset((x[part], y[part]), user_id=str(identity))

    state = {"next": -1}

    def sampler() -> int:
        state["next"] = (state["next"] + 1) % int(work["drawn"])
        return state["next"]

    class Pace(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            """Wait for the next request."""
            from pfl.metrics import Metrics

            turns.done()
            turns.wait()
            return False, Metrics()

    module = Model()
    model = PyTorchModel(
        module,
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=work["momentum"]),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    data = FederatedDataset(user, sampler)
    turns.wait()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**7, train_cohort_size=work["drawn"], val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=work["epochs"], local_learning_rate=work["lr"], local_batch_size=work["batch"]
        ),
        NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Pace()],
    )


def fluke(folder: Path, work: dict[str, Any]) -> None:
    """fluke: FedAVG, one process with a thread per core, as it runs by itself."""
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter

    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    FlukeENV().set_inmemory(True)
    x, y = load(folder, work)
    turns = Turns(folder)
    splitter = DataSplitter(DataContainer(x, y, x[:50], y[:50], 10), distribution="iid", client_split=0.0)
    algorithm = FedAVG(
        n_clients=work["drawn"],
        data_splitter=splitter,
        hyper_params={
            "client": {
                "batch_size": work["batch"],
                "local_epochs": work["epochs"],
                "loss": "CrossEntropyLoss",
                "optimizer": {"name": "SGD", "lr": work["lr"], "momentum": work["momentum"]},
                "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
            },
            "server": {"weighted": True},
            "model": network(work["model"]),
        },
    )
    while turns.wait():
        algorithm.run(n_rounds=1, eligible_perc=1.0, finalize=False)
        turns.done()


def blazefl(folder: Path, work: dict[str, Any]) -> None:
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
    turns = Turns(folder)
    common = {"model_selector": Models(), "model_name": work["model"], "dataset": Data(), "device": "cpu", "seed": 1}
    common |= {"num_clients": work["drawn"], "batch_size": work["batch"]}
    server = fedavg.FedAvgBaseServerHandler(**common, global_round=10**6, sample_ratio=1.0)
    clients = fedavg.FedAvgThreadPoolClientTrainer(**common, epochs=work["epochs"], lr=work["lr"], num_parallels=2)
    while turns.wait():
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        turns.done()


def pfllib(folder: Path, work: dict[str, Any]) -> None:
    """PFLlib: the parts of its FedAvg's round, without its evaluation; its SGD has no momentum."""
    place = folder / "system"  # it reads ../dataset/NAME/train/CLIENT.npz before each client's training
    place.mkdir()
    n, (x, y) = work["examples"], load(folder, work)
    for client in range(work["drawn"]):
        for part in ("train", "test"):
            file = folder / "dataset" / "bench" / part / f"{client}.npz"
            file.parent.mkdir(parents=True, exist_ok=True)
            own = slice(client * n, (client + 1) * n if part == "train" else client * n + 1)
            np.savez(file, data=np.array({"x": x[own].numpy(), "y": y[own].numpy()}, dtype=object))
    os.chdir(place)
    sys.path.insert(0, str(Path(work["checkout"]) / "system"))
    off = ("few_shot", "random_join_ratio", "time_select", "auto_break", "dlg_eval", "learning_rate_decay")
    none = ("client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients", "fine_tuning_epoch_new")
    settings: dict[str, Any] = dict.fromkeys(off, False) | dict.fromkeys(none, 0)
    settings |= {"device": "cpu", "dataset": "bench", "num_classes": 10, "model": network(work["model"])}
    settings |= {"global_rounds": 1, "local_epochs": work["epochs"], "batch_size": work["batch"], "top_cnt": 1}
    settings |= {"local_learning_rate": work["lr"], "learning_rate_decay_gamma": 1.0, "num_clients": work["drawn"]}
    settings |= {"join_ratio": 1.0, "goal": "bench", "time_threthold": 1e9, "save_folder_name": "items"}
    settings |= {"algorithm": "FedAvg", "eval_gap": 1, "dlg_gap": 1, "batch_num_per_client": 1}
    server = import_module("flcore.servers.serveravg").FedAvg(SimpleNamespace(**settings), 0)
    turns = Turns(folder)
    while turns.wait():
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        turns.done()


def lab(folder: Path, work: dict[str, Any]) -> None:
    """The code of FedCross's authors: the client's training and the aggregation of their FedAvg, without evaluation."""
    sys.path.insert(0, work["checkout"])
    aggregate, client_of = import_module("models.Fed").Aggregation, import_module("models.Update").LocalUpdate_FedAvg
    from torch.utils.data import TensorDataset

    class Named(nn.Module):
        """The workload's network; their loop reads a named output."""

        def __init__(self) -> None:
            super().__init__()
            self.body = network(work["model"])

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"output": self.body(x)}

    n, data, model = work["examples"], TensorDataset(*load(folder, work)), Named()
    settings = SimpleNamespace(
        local_bs=work["batch"], local_ep=work["epochs"], optimizer="sgd", dynamic_lr=0, lr=work["lr"]
    )
    settings.momentum, settings.weight_decay, settings.device = work["momentum"], 0.0, "cpu"
    turns = Turns(folder)
    while turns.wait():
        sent = []
        for client in range(work["drawn"]):
            own = client_of(args=settings, dataset=data, idxs=range(client * n, (client + 1) * n))
            sent.append(own.train(round=0, net=copy.deepcopy(model)))
        model.load_state_dict(aggregate(sent, [n] * len(sent)))
        turns.done()


PEERS = {"pfl": pfl, "fluke": fluke, "blazefl": blazefl, "pfllib": pfllib, "lab": lab}

if __name__ == "__main__":
    home = Path(sys.argv[2])
    PEERS[sys.argv[1]](home, json.loads((home / "work.json").read_text()))
