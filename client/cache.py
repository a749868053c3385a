"""Keeps the configuration, data and model of a run loaded between its messages."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedcross.client.attack import malicious
from fedcross.client.batched.stack import slopes_of
from fedcross.client.corner import Corner
from fedcross.client.device import (
    device_errors,
    free_unused,
    keep_freed_memory,
    pick_device,
    repeats,
    set_arithmetic,
)
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Compiled, is_compiled, loss_of
from fedcross.conf.schema import RunConfig, load_for_client
from fedcross.core.errors import ConfigError
from fedcross.strategies.filters.compression import ClientHalf
from fedcross.strategies.objective import Objective
from fedcross.tasks.data import FederatedData, forget
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.width import FULL, Corners, Width, scale_outputs

#: Most bytes of examples that a process keeps in memory between visits, and their share of a GPU's memory.
KEPT_BYTES = 2**26
KEPT_SHARE = 0.03


class RunCache:
    """The loaded configuration, data, model and objective of one run, for any of its clients.

    Parameters
    ----------
    config : RunConfig
        The checked configuration.

    Attributes
    ----------
    base : str
        Digest of the untrained rest of the model (``train.only``).
    examples : dict
        Client -> its training data, of the clients whose data stay in memory (:meth:`read`).
    errors, repeats : callable
        Contexts around a computation: what a broken GPU raises becomes a DeviceError, and what on this GPU does not
        repeat itself is named once.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.errors = device_errors if self.device.type == "cuda" else nullcontext
        set_arithmetic(self.device, config.train)
        if self.device.type == "cpu":
            keep_freed_memory()
        deterministic = self.device.type == "cuda" and config.train.deterministic
        self.repeats = partial(repeats, set()) if deterministic else nullcontext
        self.data: FederatedData = config.load_data()
        self.scored: dict[Width, nn.Module] = {}
        self.base = ""
        self._nets: dict[Width, tuple[ModuleNet, ClientHalf]] = {}
        self.objective: Objective = config.new_objective()
        if not config.new_method().widths():
            self.at(FULL)
        self.compiles = is_compiled(config.train.compile, self.device, config.rounds)
        self._compiled: dict[tuple[ModuleNet, bool], Compiled] = {}
        self.examples: dict[int, tuple[Inputs, Tensor]] = {}
        self.warned = False
        if config.attack.name != "none" and self.data.partition.own:
            raise ConfigError(
                "attack: a device that knows only its own data cannot draw the malicious clients. Use a simulation."
            )
        self.malicious = malicious(config.attack, len(self.data.partition), config.seed)

    # ---- networks ----------------------------------------------------------------------------------------------------

    @cached_property
    def full(self) -> tuple[ModuleNet, ClientHalf]:
        """The full network and its compression."""
        return self.at(FULL)

    @property
    def net(self) -> ModuleNet:
        """The full network."""
        return self.full[0]

    def at(self, size: Width) -> tuple[ModuleNet, ClientHalf]:
        """Return the network of `size` and its compression; built once, with the run's initial weights."""
        if size not in self._nets:
            net = ModuleNet(self.network(size), self.device, self.config.train.precision)
            net.corners = self._corners(net, size)
            initial = {n: p.detach().cpu().numpy() for n, p in net.params.items()}
            self._nets[size] = net, ClientHalf(self.config.compression, initial)
        return self._nets[size]

    def network(self, size: Width) -> nn.Module:
        """Return a network of `size` as clients train it; HeteroFL's divides what hidden layers return."""
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

    def compiled(self, net: ModuleNet, *, stacked: bool) -> Compiled:
        """Return the compiled step on `net`, of one client or of several, for runs whose steps are compiled."""
        if (net, stacked) not in self._compiled:
            called = slopes_of(net, self.objective, padded=True) if stacked else loss_of(net, self.objective)
            self._compiled[net, stacked] = Compiled(called, self.device)
        return self._compiled[net, stacked]

    # ---- examples ----------------------------------------------------------------------------------------------------

    def read(self, client: int, net: ModuleNet) -> tuple[Inputs, Tensor]:
        """Read all training examples of `client`, in the memory layout of `net`, which is the same for every size.

        They stay in `examples` while ``KEPT_BYTES`` allow it.
        """
        inputs, y = self.data.inputs(client, self.device)
        own = inputs.like(net.arrange(inputs.held)), y
        kept = sum(part.nbytes for pair in (*self.examples.values(), own) for part in pair)
        if kept <= kept_bytes(self.device):
            self.examples[client] = own
        return own

    def close(self) -> None:
        """Give the GPU's unused memory back; another run comes."""
        if self._compiled:
            torch.compiler.reset()  # it compiles one function at most eight times
        self._compiled.clear()
        free_unused(self.device)


def kept_bytes(device: torch.device) -> float:
    """Return how many bytes of examples stay on `device` between visits."""
    if device.type != "cuda":
        return KEPT_BYTES
    _, total = torch.cuda.mem_get_info(device)
    return max(KEPT_BYTES, total * KEPT_SHARE)


_open: dict[str, RunCache] = {}
#: The run for which this process read the device's own data; empty before its first message.
_read_for: list[str] = []


def run_cache(overrides: str, run: str = "") -> RunCache:
    """Return this process's cache for the overrides of a run; a process keeps one cache at a time.

    `run` is the run's identity. A device reads its own data anew for another run: it may have changed since.
    """
    if overrides not in _open:
        config = load_for_client(overrides)
        _close()
        _open[overrides] = RunCache(config)
    cache = _open[overrides]
    if run and run not in _read_for and cache.data.partition.own:
        stale, _read_for[:] = bool(_read_for), [run]
        if stale:
            _close()
            forget()
            return run_cache(overrides)
    return cache


def _close() -> None:
    """Let go of this process's cache."""
    while _open:
        _open.popitem()[1].close()
