"""The reference: a loop written without a framework, and the same loop tuned. Two processes, one thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Cell, Workload, metered

State = dict[str, Tensor]


def network(name: str, *, pool_first: bool) -> nn.Module:
    """Return the workload's CNN; in textbooks, ReLU comes before the pool."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        tail: list[nn.Module] = [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]
        return [nn.Conv2d(channels_in, channels_out, 5), *tail]

    if name == "lenet5":
        body = [
            *block(3, 6),
            *block(6, 16),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        ]
        return nn.Sequential(*body, nn.Linear(84, 10))
    body = [*block(3, 32), *block(32, 64), nn.Flatten(), nn.Linear(1600, 512), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(512, 10))


def textbook(model: nn.Module, state: State, x: Tensor, y: Tensor, work: Workload) -> State:
    """Train one client with a DataLoader and torch's SGD."""
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
    loader = DataLoader(TensorDataset(x, y), batch_size=work.batch, shuffle=True)
    for _ in range(work.epochs):
        for inputs, labels in loader:
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tuned(model: nn.Module, state: State, x: Tensor, y: Tensor, work: Workload) -> State:
    """Train one client with preloaded tensors, channels last and torch's fused SGD."""
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum, fused=True)
    x = x.contiguous(memory_format=torch.channels_last)
    for _ in range(work.epochs):
        order = torch.randperm(len(y))
        inputs, labels = x[order], y[order]
        for start in range(0, len(y), work.batch):
            optimiser.zero_grad()
            part = slice(start, start + work.batch)
            functional.cross_entropy(model(inputs[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Loop:
    """FedAvg by a loop over clients in `processes` processes; each process gets every `processes`-th client."""

    def __init__(self, work: Workload, x: Tensor, y: Tensor, processes: int, *, tune: bool = False) -> None:
        self.work = work
        context: Any = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work, x, y, tune), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.state: State = network(work.model, pool_first=tune).state_dict()

    @property
    def pids(self) -> list[int]:
        """Return the processes of this loop."""
        return [int(process.pid) for process in self._processes]

    def round(self) -> Cell:
        """Train and average one round."""
        with metered(self.pids) as cell:
            chosen = range(self.work.drawn)
            for place, pipe in enumerate(self._pipes):
                pipe.send((self.state, list(chosen)[place :: len(self._pipes)]))
            states = [state for pipe in self._pipes for state in pipe.recv()]
            self.state = {n: sum(s[n] for s in states) / len(states) for n in self.state}
        return cell

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(pipe: Connection, work: Workload, x: Tensor, y: Tensor, tune: bool) -> None:
    torch.set_num_threads(1)
    model = network(work.model, pool_first=tune)
    train = tuned if tune else textbook
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            state, clients = pipe.recv()
            parts = [slice(c * work.examples, (c + 1) * work.examples) for c in clients]
            pipe.send([train(model, state, x[part], y[part], work) for part in parts])
