"""The memory that recorded steps keep for themselves."""

from __future__ import annotations

from collections import Counter
from weakref import WeakSet

import torch


class Graph:
    """Repeats a recorded call; knows how much memory the graph keeps for itself.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
        The recording.
    device : torch.device
        Where it works.
    nbytes : int
        Bytes of its own.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._graph = graph
        _alive.add(self)

    def __call__(self) -> None:
        """Do once more what was recorded."""
        self._graph.replay()


_alive: WeakSet[Graph] = WeakSet()
_lost: Counter[torch.device] = Counter()


def lose(device: torch.device, nbytes: int) -> None:
    """Count `nbytes` of `device` as gone: torch does not give back what a failed recording had reserved."""
    _lost[device] += max(nbytes, 0)


def kept_by_graphs(device: torch.device) -> int:
    """Return how many bytes of `device` belong to the recordings of this process alone, also to those that failed.

    Results inside a graph have fixed places, which torch reserves for as long as the graph lives. For torch they are
    not allocated, and yet no other tensor can have them.
    """
    return _lost[device] + sum(graph.nbytes for graph in _alive if graph.device == device)
