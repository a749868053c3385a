"""Runs FedAvg rounds in another framework, or in a plain loop, one per request. Imports nothing of fedcross.

::

    python peer_rounds.py NAME FOLDER CHECKOUT WORK

FOLDER holds ``data.npz``, CHECKOUT is that of a framework without a package, WORK is a workload in JSON. A line on
stdin asks for a round; a line on stdout says how many seconds it took. The end of stdin ends the program.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Work = dict[str, Any]
State = dict[str, Tensor]


def network(name: str) -> nn.Module:
    """Return the CNN of the workload as textbooks have it."""
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


class Rounds:
    """The requests of rounds; of several processes (torchrun) only rank 0 reads and answers."""

    def __init__(self) -> None:
        self.first = os.environ.get("RANK", "0") == "0"
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the frameworks print goes to the log
        self.start = 0.0

    def next(self) -> bool:
        """Answer the request before, wait for the next one and return True."""
        if self.first:
            if self.start:
                print(time.perf_counter() - self.start, file=self.answers, flush=True)
            if not sys.stdin.readline():
                sys.exit()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.start = time.perf_counter()
        return True


def default_momentum(work: Work) -> None:
    """Give torch's SGD the workload's momentum, for frameworks without such a setting."""
    torch.optim.SGD = functools.partial(torch.optim.SGD, momentum=work["momentum"])  # type: ignore[assignment,misc]


def train(work: Work, state: State, x: Tensor, y: Tensor, tuned: bool) -> State:
    """Train one client by plain torch; `tuned`: channels last and torch's fused SGD."""
    torch.set_num_threads(1)
    model = network(work["model"])
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=work["lr"], momentum=work["momentum"], fused=tuned)
    x = x.contiguous(memory_format=torch.channels_last) if tuned else x
    for _ in range(work["epochs"]):
        for part in torch.split(torch.randperm(len(y)), work["batch"]):
            optimiser.zero_grad()
            functional.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def textbook(rounds: Rounds, folder: Path, work: Work, tuned: bool = False) -> None:
    """The loop of a textbook, in two processes."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    x, y = (torch.split(whole, work["examples"]) for whole in load(folder, work))
    state = network(work["model"]).state_dict()
    with get_context("fork").Pool(2) as pool:
        while rounds.next():
            jobs = [(work, state, x[i].clone(), y[i].clone(), tuned) for i in range(work["drawn"])]
            states = pool.starmap(train, jobs, chunksize=1)
            state = {name: torch.stack([one[name] for one in states]).mean(0) for name in state}


def pfl(rounds: Rounds, folder: Path, work: Work) -> None:
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
            """Wait for the next round."""
            rounds.next()
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
    endless = NNAlgorithmParams(
        central_num_iterations=10**6,
        evaluation_frequency=10**7,
        train_cohort_size=work["drawn"],
        val_cohort_size=0,
    )
    backend = SimulatedBackend(training_data=data, val_data=data)
    rounds.next()
    FederatedAveraging().run(
        endless, backend, model, local, NNEvalHyperParams(local_batch_size=1000), callbacks=[Timed()]
    )


def fluke(rounds: Rounds, folder: Path, work: Work) -> None:
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
    while rounds.next():
        algorithm.run(n_rounds=1, eligible_perc=1.0, finalize=False)


def blazefl(rounds: Rounds, folder: Path, work: Work) -> None:
    """BlazeFL: its own FedAvg on its thread pool, two threads of one torch thread each."""
    from blazefl.contrib import fedavg
    from torch.utils.data import DataLoader, TensorDataset

    class Data:
        def get_dataloader(self, type_: str, cid: int | None, batch_size: int, generator: Any) -> Any:
            part = slice((cid or 0) * work["examples"], ((cid or 0) + 1) * work["examples"])
            return DataLoader(TensorDataset(x[part], y[part]), batch_size, shuffle=True, generator=generator)

    class Models:
        def select_model(self, model_name: str) -> nn.Module:
            return network(model_name)

    default_momentum(work)
    x, y = load(folder, work)
    common = {"model_selector": Models(), "model_name": work["model"], "dataset": Data(), "device": "cpu", "seed": 1}
    common |= {"num_clients": work["drawn"], "batch_size": work["batch"]}
    server = fedavg.FedAvgBaseServerHandler(**common, global_round=10**6, sample_ratio=1.0)
    clients = fedavg.FedAvgThreadPoolClientTrainer(**common, epochs=work["epochs"], lr=work["lr"], num_parallels=2)
    while rounds.next():
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)


def pfllib(rounds: Rounds, folder: Path, work: Work) -> None:
    """PFLlib: the steps of its FedAvg's round, without its evaluation; its clients read their data from files."""
    place, n, (x, y) = folder / "system", work["examples"], load(folder, work)
    place.mkdir()
    for client in range(work["drawn"]):
        own = slice(client * n, (client + 1) * n)
        for part in ("train", "test"):
            file = folder / "dataset" / "bench" / part / f"{client}.npz"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(file, data=np.array({"x": x[own].numpy(), "y": y[own].numpy()}, dtype=object))
    os.chdir(place)
    default_momentum(work)
    off = ("few_shot", "random_join_ratio", "time_select", "auto_break", "dlg_eval", "learning_rate_decay")
    none = ("client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients", "fine_tuning_epoch_new")
    settings: Work = dict.fromkeys(off, False) | dict.fromkeys(none, 0)
    settings |= {"device": "cpu", "dataset": "bench", "num_classes": 10, "model": network(work["model"])}
    settings |= {"global_rounds": 1, "local_epochs": work["epochs"], "batch_size": work["batch"], "top_cnt": 1}
    settings |= {"local_learning_rate": work["lr"], "learning_rate_decay_gamma": 1.0, "num_clients": work["drawn"]}
    settings |= {"join_ratio": 1.0, "goal": "bench", "time_threthold": 1e9, "save_folder_name": "items"}
    settings |= {"algorithm": "FedAvg", "eval_gap": 1, "dlg_gap": 1, "batch_num_per_client": 1}
    server = import_module("flcore.servers.serveravg").FedAvg(SimpleNamespace(**settings), 0)
    while rounds.next():
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()


def lab(rounds: Rounds, folder: Path, work: Work) -> None:
    """The code of FedCross's authors: the client's training and the aggregation of their FedAvg, without evaluation."""
    aggregate, client_of = import_module("models.Fed").Aggregation, import_module("models.Update").LocalUpdate_FedAvg

    class Named(nn.Module):  # their loop reads a named output
        def __init__(self) -> None:
            super().__init__()
            self.body = network(work["model"])

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"output": self.body(x)}

    n, data, model = work["examples"], torch.utils.data.TensorDataset(*load(folder, work)), Named()
    settings = SimpleNamespace(local_bs=work["batch"], local_ep=work["epochs"], optimizer="sgd", dynamic_lr=0)
    settings.lr, settings.momentum, settings.device = work["lr"], work["momentum"], "cpu"
    while rounds.next():
        sent = []
        for client in range(work["drawn"]):
            own = client_of(args=settings, dataset=data, idxs=range(client * n, (client + 1) * n))
            sent.append(own.train(round=0, net=copy.deepcopy(model)))
        model.load_state_dict(aggregate(sent, [n] * len(sent)))


PROGRAMS: dict[str, Callable[[Rounds, Path, Work], None]] = {
    **{"textbook": textbook, "tuned": functools.partial(textbook, tuned=True), "pfl": pfl, "fluke": fluke},
    **{"blazefl": blazefl, "pfllib": pfllib, "lab": lab},
}

if __name__ == "__main__":
    checkout = Path(sys.argv[3])
    sys.path[:0] = [str(checkout), str(checkout / "system")]  # PFLlib's modules lie in "system"
    PROGRAMS[sys.argv[1]](Rounds(), Path(sys.argv[2]), json.loads(sys.argv[4]))
