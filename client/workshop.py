"""Keeps the configuration, data and model of a run loaded between its messages, and answers the messages with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from logging import WARNING
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor, nn

from fedcross.client.attack import malicious
from fedcross.client.batched.state import Work
from fedcross.client.captured import Captured
from fedcross.client.corner import Corner
from fedcross.client.device import device_errors, evaluation_batch, repeats, set_arithmetic
from fedcross.client.device import pick_device as pick_device
from fedcross.client.flat_model import ModuleNet
from fedcross.client.freed_memory import keep_freed_memory
from fedcross.client.graph_memory import give_back
from fedcross.client.recordings import Recorder
from fedcross.client.trainer import train
from fedcross.client.visit import Arrived, arrive, leave
from fedcross.conf.schema import RunConfig, load_for_client
from fedcross.core.errors import ConfigError, DataError, ProtocolError
from fedcross.core.site import uses_graphs
from fedcross.strategies.parts.objective import Objective, Trained
from fedcross.strategies.parts.widths import asked
from fedcross.strategies.round.registry import method_class
from fedcross.strategies.wire.compression import ClientHalf
from fedcross.strategies.wire.records import views
from fedcross.tasks.data import FederatedData, forget
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.slicing.plan import FULL, Plan, Size
from fedcross.tasks.scoring import score

if TYPE_CHECKING:
    from fedcross.client.batched.captured import Together


class Workshop:
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
        self.method = method_class(config.modules["method"])
        self._scored: dict[Size, nn.Module] = {}
        network, self.base = config.network(self.data.task)
        self._network: nn.Module | None = network
        self._slices = self.method.slices(config.method)
        self._benches: dict[Size, tuple[ModuleNet, ClientHalf]] = {}
        self.objective: Objective = self.method.client_half(config.method)
        if not self._slices:
            self.at(FULL)
        self._trainers: dict[ModuleNet, Callable[..., Trained]] = {}
        #: Client -> its inputs and labels, for as many clients as fit into memory (:mod:`client.visit`).
        self.prepared: dict[int, tuple[Inputs, Tensor]] = {}
        self._together: dict[ModuleNet, Together] = {}
        #: What records steps on this GPU; tells how many were replayed, and why none are.
        self.recorders: list[Recorder[Any]] = []
        self._warned = False
        if config.attack.name != "none" and self.data.partition.own:
            raise ConfigError(
                "attack: a device that knows only its own data cannot draw the malicious clients. Use a simulation."
            )
        self.malicious = malicious(config.attack, len(self.data.partition), config.seed)

    def _largest(self) -> int:
        """Return how many examples the largest client has in a round."""
        most = max(map(len, self.data.partition.train), default=0)
        return min(most, self.config.train.examples or most)

    @property
    def net(self) -> ModuleNet:
        """The full network."""
        return self.at(FULL)[0]

    def at(self, size: Size) -> tuple[ModuleNet, ClientHalf]:
        """Return the network of `size` and its compression; built once.

        A slice needs the full network for a moment, which is then given up: a small device keeps, and trains, the slice
        alone. The full network itself is trained as a copy, since a slice of another width needs its initial weights.
        """
        if size not in self._benches:
            network = self._full()
            if self._slices:
                network = self._sliced(network, size)
                if network is self._network:
                    network = copy.deepcopy(network)
                else:
                    self._network = None
            net = ModuleNet(network, self.device, self.config.train.precision)
            net.corners = self._corners(net, size)
            initial = {n: p.detach().cpu().numpy() for n, p in net.params.items()}
            self._benches[size] = net, ClientHalf(self.config.compression, initial)
        return self._benches[size]

    def _corners(self, net: ModuleNet, size: Size) -> list[Corner]:
        """Return the narrower sizes that the objective trains in `net`, of `size`."""
        return [
            Corner(
                self.at(narrow)[0],
                net,
                {name: self._plan.within(name, narrow, size) for name in net.names if self._plan.cuts(name, narrow)},
            )
            for narrow in self.objective.corners(size)
        ]

    def arrange(self, x: Tensor) -> Tensor:
        """Return inputs in the memory layout of the networks, which is the same for every size."""
        net, _ = next(iter(self._benches.values())) if self._benches else self.at(FULL)
        return net.arrange(x)

    def _full(self) -> nn.Module:
        """Return the full network with its initial weights; built anew where it was given up."""
        if self._network is None:
            self._network, self.base = self.config.network(self.data.task)
        return self._network

    def _sliced(self, network: nn.Module, size: Size) -> nn.Module:
        """Return the slice of `network`; the server has tried every size before the run began."""
        from fedcross.tasks.models.slicing import cut

        method: Any = self.config.method
        divisor = size.width / max(method.widths) if getattr(method, "scaler", False) else 1.0
        return network if size.width >= 1 else cut(network, self._plan, size, scaler=divisor)

    @cached_property
    def _plan(self) -> Plan:
        from fedcross.tasks.models.slicing import plan_of

        return plan_of(self._full(), self.data.task)

    def _trainer(self, net: ModuleNet) -> Callable[..., Trained]:
        """Return what trains a client on `net`: on a GPU a recorded step, else the plain loop."""
        if net not in self._trainers:
            if self.device.type == "cuda" and uses_graphs():
                captured = Captured(net, self.objective, self._largest())
                self.recorders.append(captured)
                self._trainers[net] = captured.train
            else:
                self._trainers[net] = partial(train, net, self.objective)
        return self._trainers[net]

    def _recorded(self, net: ModuleNet) -> Together | None:
        """Return the recorded step of several clients on `net`; None where there is no GPU."""
        if self.device.type != "cuda" or not uses_graphs():
            return None
        if net not in self._together:
            from fedcross.client.batched.captured import Together

            self._together[net] = Together(net, self.objective, self._largest())
            self.recorders.append(self._together[net])
        return self._together[net]

    def train(self, content: RecordDict) -> RecordDict:
        """Train as a train message with this content asks, and return the content of the reply."""
        with one_thread(self.device), self._repeats():
            arrived = self._arrive(content)
            augment = self.data.task.augment
            trained = self._trainer(arrived.net)(arrived.visit, arrived.prepared, arrived.settings, augment)
            return leave(self, arrived, trained)

    def train_together(self, contents: Sequence[RecordDict], *, memory: int | None, graph: bool) -> list[RecordDict]:
        """Train as several train messages ask, in one computation, and return the replies' contents in order.

        An objective that cannot be batched is trained one client after another.
        """
        if not self.objective.batchable:
            if not self._warned:
                self._warned = True
                kind = type(self.objective).__name__
                log(WARNING, "fedcross: %s cannot be batched, so clients are trained one after another.", kind)
            return [self.train(content) for content in contents]
        from fedcross.client.batched.trainer import train_batched

        with one_thread(self.device), self._repeats():
            arrived = [self._arrive(content) for content in contents]
            if any(a.settings != arrived[0].settings for a in arrived):
                raise ProtocolError("Clients of one exchange have different numbers of epochs. Use engine=local.")
            results: dict[int, Trained] = {}
            settings, augment = arrived[0].settings, self.data.task.augment
            for net, places in by_net(arrived).items():  # models of one size make a stack
                works = [Work(arrived[i].visit, arrived[i].prepared, arrived[i].scratch) for i in places]
                recorded = self._recorded(net) if graph else None
                trained = train_batched(net, self.objective, works, settings, augment, memory=memory, together=recorded)
                results |= zip(places, trained)
            return [leave(self, one, results[i]) for i, one in enumerate(arrived)]

    def _arrive(self, content: RecordDict) -> Arrived:
        asks = content.config_records["config"]
        net, wire = self.at(asked(asks) if "width" in asks else FULL)
        return arrive(self, content, net, wire)

    def close(self) -> None:
        """Give the GPU's memory of recorded steps back, and what torch keeps of it for later; another run comes."""
        for recorder in self.recorders:
            recorder.release()
        give_back(self.device)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Return the accuracy and loss of the received model on the client's own test part."""
        client = int(content.config_records["config"]["client"])  # type: ignore[arg-type]
        own = self.data.client_test(client, self.device)
        if own is None:
            raise DataError(f"client {client} has no test examples of its own: this partition gives clients none.")
        size = asked(content.config_records["config"])
        if size not in self._scored:
            network, _ = self.config.network(self.data.task)
            fitting = self.method.evaluation_network(network, self.config.method)
            self._scored[size] = self._sliced(fitting, size).to(self.device).eval()
        arrays = views(content.array_records["arrays"])
        with one_thread(self.device):
            batch = evaluation_batch(self.device, own[0][0].numel())
            found = score(self._scored[size], arrays, *own, self.data.task.classes, batch)
        metrics = MetricRecord({"num-examples": len(own[1]), "accuracy": found.accuracy, "loss": found.loss})
        return RecordDict({"metrics": metrics})


def by_net(arrived: Sequence[Arrived]) -> dict[ModuleNet, list[int]]:
    """Return the places of the visits that train on the same network."""
    groups: dict[ModuleNet, list[int]] = {}
    for i, one in enumerate(arrived):
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


_open: dict[str, Workshop] = {}


def workshop(overrides: str) -> Workshop:
    """Return this process's workshop for the overrides of a run; a process keeps one workshop at a time."""
    if overrides not in _open:
        config = load_for_client(overrides)
        _close()
        _open[overrides] = Workshop(config)
    return _open[overrides]


def _close() -> None:
    """Let go of this process's workshop."""
    while _open:
        _open.popitem()[1].close()


#: The run for which this process read the device's own data; empty before its first message.
_read_for: list[str] = []


def _of_this_run(shop: Workshop, overrides: str, run: str) -> Workshop:
    """Return `shop`, or a new workshop if the device's own data was read for another run and may have changed since."""
    if shop.data.partition.own and run and run not in _read_for:
        if _read_for:
            _close()
            forget()
            shop = workshop(overrides)
        _read_for[:] = [run]
    return shop


def do(task: str, overrides: str, content: RecordDict | None) -> RecordDict:
    """Do `task` (``train``, ``evaluate``) for the run that `overrides` describe; without content, only load the run."""
    shop = workshop(overrides)
    if content is None:
        return RecordDict()
    shop = _of_this_run(shop, overrides, str(content.config_records["config"].get("run", "")))
    with shop.errors():
        return {"train": shop.train, "evaluate": shop.evaluate}[task](content)
