"""The memory that recorded steps keep for themselves."""

from __future__ import annotations

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


def kept_by_graphs(device: torch.device) -> int:
    """Return how many bytes of `device` belong to the recordings of this process alone.

    Results inside a graph have fixed places, which torch reserves for as long as the graph lives. For torch they are
    not allocated, and yet no other tensor can have them.
    """
    return sum(graph.nbytes for graph in _alive if graph.device == device)
