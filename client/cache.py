"""Keeps the configuration, data and model of a run loaded between its messages, and answers the messages with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from logging import WARNING
from typing import Any

import torch
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor, nn

from fedcross.client.attack import malicious
from fedcross.client.batched.stack import Work, slopes_of
from fedcross.client.batched.trainer import train_batched
from fedcross.client.compiled import Compiled, is_compiled
from fedcross.client.corner import Corner
from fedcross.client.device import device_errors, evaluation_batch, free_unused, pick_device, repeats, set_arithmetic
from fedcross.client.flat_model import ModuleNet
from fedcross.client.freed_memory import keep_freed_memory
from fedcross.client.request import Request, receive, reply
from fedcross.client.trainer import loss_of, train
from fedcross.conf.schema import RunConfig, load_for_client
from fedcross.core.errors import ConfigError, DataError, ProtocolError
from fedcross.strategies.objective import Objective, Trained
from fedcross.strategies.parts.widths import asked
from fedcross.strategies.wire.compression import ClientHalf
from fedcross.strategies.wire.records import views
from fedcross.tasks.data import FederatedData, forget
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.width import FULL, Corners, Width, scale_outputs
from fedcross.tasks.scoring import score


class RunCache:
    """The loaded configuration, data, model and objective of one run, for any of its clients.

    Parameters
    ----------
    config : RunConfig
        The checked configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        #: Around every computation: what a broken GPU raises becomes a DeviceError.
        self.errors = device_errors if self.device.type == "cuda" else nullcontext
        set_arithmetic(self.device, config.train)
        if self.device.type == "cpu":
            keep_freed_memory()
        deterministic = self.device.type == "cuda" and config.train.deterministic
        #: Around training: says once what on this GPU does not repeat itself, if that was asked for.
        self._repeats = partial(repeats, set()) if deterministic else nullcontext
        self.data: FederatedData = config.load_data()
        self._scored: dict[Width, nn.Module] = {}
        self.base = ""
        self._benches: dict[Width, tuple[ModuleNet, ClientHalf]] = {}
        self.objective: Objective = config.new_objective()
        if not config.new_method().widths():
            self.at(FULL)
        #: Whether the step is compiled, and what is: by network, for one client and for a stack of them.
        self._compiles = is_compiled(config.train.compile, self.device, config.rounds)
        self._compiled: dict[tuple[ModuleNet, bool], Compiled] = {}
        #: Client -> its inputs and labels, for as many clients as fit into memory (:mod:`client.request`).
        self.prepared: dict[int, tuple[Inputs, Tensor]] = {}
        self._warned = False
        if config.attack.name != "none" and self.data.partition.own:
            raise ConfigError(
                "attack: a device that knows only its own data cannot draw the malicious clients. Use a simulation."
            )
        self.malicious = malicious(config.attack, len(self.data.partition), config.seed)

    @property
    def net(self) -> ModuleNet:
        """The full network."""
        return self.at(FULL)[0]

    def at(self, size: Width) -> tuple[ModuleNet, ClientHalf]:
        """Return the network of `size` and its compression; built once, with the run's initial weights."""
        if size not in self._benches:
            net = ModuleNet(self._network(size), self.device, self.config.train.precision)
            net.corners = self._corners(net, size)
            initial = {n: p.detach().cpu().numpy() for n, p in net.params.items()}
            self._benches[size] = net, ClientHalf(self.config.compression, initial)
        return self._benches[size]

    def _network(self, size: Width) -> nn.Module:
        """Return the network of `size` that clients train; HeteroFL's divides what hidden layers return."""
        network, self.base = self.config.network(self.data.task, width=size)
        method: Any = self.config.method
        if getattr(method, "scaler", False) and size.ratio < max(method.widths):
            scale_outputs(network, self._shapes.scaled, size.ratio / max(method.widths))
        return network

    @cached_property
    def _shapes(self) -> Corners:
        """The shapes of the models of every width."""
        return self.config.corners(self.data.task)

    def _corners(self, net: ModuleNet, size: Width) -> list[Corner]:
        """Return the narrower sizes that the objective trains in `net`, of `size`."""
        found = []
        for narrow in self.objective.corners(size):
            cut = [name for name in net.names if self._shapes.cuts(name, narrow)]
            places = {name: self._shapes.positions(name, narrow, size) for name in cut}
            found.append(Corner(self.at(narrow)[0], net, places))
        return found

    def arrange(self, x: Tensor) -> Tensor:
        """Return inputs in the memory layout of the networks, which is the same for every size."""
        net, _ = next(iter(self._benches.values())) if self._benches else self.at(FULL)
        return net.arrange(x)

    def _step(self, net: ModuleNet, *, stacked: bool) -> Compiled | None:
        """Return the compiled step on `net`, of one client or of several; None where steps are called."""
        if not self._compiles:
            return None
        if (net, stacked) not in self._compiled:
            called = slopes_of(net, self.objective, padded=True) if stacked else loss_of(net, self.objective)
            self._compiled[net, stacked] = Compiled(called, self.device)
        return self._compiled[net, stacked]

    def train(self, content: RecordDict) -> RecordDict:
        """Train as a train message with this content asks, and return the content of the reply."""
        with one_thread(self.device), self._repeats():
            one = self._receive(content)
            step = self._step(one.net, stacked=False)
            augment = self.data.task.augment
            trained = train(one.net, self.objective, one.visit, one.prepared, one.settings, augment, compiled=step)
            return reply(self, one, trained)

    def train_together(self, contents: Sequence[RecordDict], *, memory: int | None, graph: bool) -> list[RecordDict]:
        """Train as several train messages ask, in one computation, and return the replies' contents in order.

        `graph` allows a compiled step. An objective that cannot be batched is trained one client after another.
        """
        if not self.objective.batchable:
            if not self._warned:
                self._warned = True
                kind = type(self.objective).__name__
                log(WARNING, "fedcross: %s cannot be batched, so clients are trained one after another.", kind)
            return [self.train(content) for content in contents]
        with one_thread(self.device), self._repeats():
            requests = [self._receive(content) for content in contents]
            if any(one.settings != requests[0].settings for one in requests):
                raise ProtocolError("Clients of one exchange have different numbers of epochs. Use engine=local.")
            results: dict[int, Trained] = {}
            settings, augment = requests[0].settings, self.data.task.augment
            for net, places in by_net(requests).items():  # models of one width make a stack
                works = [Work(requests[i].visit, requests[i].prepared, requests[i].scratch) for i in places]
                step = self._step(net, stacked=True) if graph else None
                trained = train_batched(net, self.objective, works, settings, augment, memory=memory, compiled=step)
                results |= zip(places, trained)
            return [reply(self, one, results[i]) for i, one in enumerate(requests)]

    def _receive(self, content: RecordDict) -> Request:
        asks: Any = content["config"]
        net, wire = self.at(asked(asks) if "width" in asks else FULL)
        return receive(self, content, net, wire)

    def close(self) -> None:
        """Give the GPU's unused memory back; another run comes."""
        if self._compiled:
            torch.compiler.reset()  # it compiles one function at most eight times
        self._compiled.clear()
        free_unused(self.device)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Return the accuracy and loss of the received model on the client's own test part."""
        client = int(content.config_records["config"]["client"])  # type: ignore[arg-type]
        own = self.data.client_test(client, self.device)
        if own is None:
            raise DataError(f"client {client} has no test examples of its own: this partition gives clients none.")
        size = asked(content.config_records["config"])
        if size not in self._scored:
            fitting = self.config.new_method().network(self._network(size), deployed=True)
            self._scored[size] = fitting.to(self.device).eval()
        arrays = views(content.array_records["arrays"])
        with one_thread(self.device):
            batch = evaluation_batch(self.device, own[0][0].numel())
            found = score(self._scored[size], arrays, *own, self.data.task.classes, batch)
        metrics = MetricRecord({"num-examples": len(own[1]), "accuracy": found.accuracy, "loss": found.loss})
        return RecordDict({"metrics": metrics})


def by_net(requests: Sequence[Request]) -> dict[ModuleNet, list[int]]:
    """Return the places of the requests that train on the same network."""
    groups: dict[ModuleNet, list[int]] = {}
    for i, one in enumerate(requests):
        groups.setdefault(one.net, []).append(i)
    return groups


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread for CPU training inside the block.

    Several clients train at the same time, and the result must not depend on the machine's number of cores.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_open: dict[str, RunCache] = {}


def run_cache(overrides: str) -> RunCache:
    """Return this process's cache for the overrides of a run; a process keeps one cache at a time."""
    if overrides not in _open:
        config = load_for_client(overrides)
        _close()
        _open[overrides] = RunCache(config)
    return _open[overrides]


def _close() -> None:
    """Let go of this process's cache."""
    while _open:
        _open.popitem()[1].close()


#: The run for which this process read the device's own data; empty before its first message.
_read_for: list[str] = []


def _of_this_run(cache: RunCache, overrides: str, run: str) -> RunCache:
    """Return `cache`, or a new cache if the device's own data was read for another run and may have changed since."""
    if run and cache.data.partition.own and run not in _read_for:
        if _read_for:
            _close()
            forget()
            cache = run_cache(overrides)
        _read_for[:] = [run]
    return cache


def do(task: str, overrides: str, content: RecordDict | None) -> RecordDict:
    """Do `task` (``train``, ``evaluate``) for the run that `overrides` describe; without content, only load the run."""
    cache = run_cache(overrides)
    if content is None:
        return RecordDict()
    cache = _of_this_run(cache, overrides, str(content.config_records["config"].get("run", "")))
    with cache.errors():
        return {"train": cache.train, "evaluate": cache.evaluate}[task](content)
