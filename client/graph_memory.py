"""The memory that recorded steps keep for themselves, and the streams on which they were recorded."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from weakref import WeakSet, finalize

import torch


class Graph:
    """Repeats a recorded call; knows its stream, and how much memory the graph keeps for itself.

    No other graph that exists has its stream. cuBLAS has memory for each stream, whose place a graph keeps, and some
    versions of torch (2.12 to 2.14, and 2.15 with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``) free all memory of a stream with
    one of its graphs (pytorch issue 193402). The next graph gets the stream after this one has let go of it.

    Parameters
    ----------
    device : torch.device
        Where it works, with its number.

    Attributes
    ----------
    graph : torch.cuda.CUDAGraph
        The recording.
    stream : torch.cuda.Stream
        For its warm-up and recording; it may be replayed on any.
    nbytes : int
        Bytes of its own.
    """

    def __init__(self, device: torch.device) -> None:
        free = _streams[device]
        self.device, self.nbytes, self.graph = device, 0, torch.cuda.CUDAGraph()
        self.stream = free.pop() if free else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _alive.add(self)
        finalize(self, _let_go, self.graph, self.stream, free).atexit = False

    def __call__(self) -> None:
        """Do once more what was recorded."""
        self.graph.replay()


#: By device, those of graphs that are gone.
_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
_alive: WeakSet[Graph] = WeakSet()
_lost: Counter[torch.device] = Counter()


def _let_go(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, free: list[torch.cuda.Stream]) -> None:
    """Give a graph's memory back, and after that its stream."""
    graph.reset()
    free.append(stream)


def give_back(device: torch.device) -> None:
    """Give the memory that torch holds on `device` and does not use back to it; nothing on a CPU.

    cuBLAS's own memory too, if no recording is left that has its place. On an H200 a loop that had fitted did not fit
    after a failed recording, with 32 MB still in a graph's pool; that it was cuBLAS's is not proven.
    """
    if device.type != "cuda":
        return
    gc.collect()
    if not _alive:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def lose(device: torch.device, nbytes: int) -> None:
    """Count `nbytes` of `device` as gone: torch does not give back what a failed recording had reserved."""
    _lost[device] += max(nbytes, 0)


def kept_by_graphs(device: torch.device) -> int:
    """Return how many bytes of `device` belong to the recordings of this process alone, also to those that failed.

    Results inside a graph have fixed places, which torch reserves for as long as the graph lives. For torch they are
    not allocated, and yet no other tensor can have them.
    """
    return _lost[device] + sum(graph.nbytes for graph in _alive if graph.device == device)
