"""Two rounds of a method on made-up data, as a user runs them."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import FLOWER_LOGGER

from benchmarks.gpu.models import WORDS
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found, Lines
from benchmarks.gpu.trainers import replayed
from fedcross.client import workshop
from fedcross.engines.batched import APART

#: Two rounds, because some methods begin in the second; a visit has some 12 full batches, of which most are replayed.
SIZES = (
    *("rounds=2", "partition.clients=6", "clients_per_round=3", "train.epochs=3", "train.batch=8"),
    *("logger=none", "task=arrays"),
)
#: The method of `smoke`; all others have an item of their own.
FIRST = "fedcross"
LOCAL = ["engine=local", "engine.workers=1"]


#: Network -> settings of it, for methods on other networks than theirs: batch normalisation of vectors with dropout, or
#: of pictures; a recurrent layer. The last batch of most clients is a short one.
NETWORKS = {
    "": [],
    "own": ["model=own", "model.path=benchmarks.gpu.models:Own"],
    "pictures": ["model=own", "model.path=benchmarks.gpu.models:Pictures"],
    "lstm": ["model=lstm", f"task.vocabulary={WORDS}"],
}


def ran(method: str, engine: Sequence[str], device: str, network: str = "") -> tuple[dict[str, Any], list[Any], float]:
    """Run `method` on `device`; return its model, what recorded its steps, and how far a weight has moved at most.

    `network` is one of :data:`NETWORKS`, or empty for the method's own.
    """
    from fedcross import run
    from fedcross.server.commands.export import _network

    own = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else [*NETWORKS[network]]
    own += ["method.generator_steps=3"] if method.startswith("fedgen") else []
    own += ["method.buffer=3"] if method == "fedbuff" else []  # ten updates are more than two rounds have
    draw = np.random.default_rng(1)
    workshop._close()  # gives the graphs of the run before back, at once
    with tempfile.TemporaryDirectory() as folder:
        shape, most = ((250, 20), WORDS) if network == "lstm" else ((250, 8, 8), 256)
        x, y = draw.integers(0, most, shape, np.uint8), draw.integers(0, 10, 250)
        np.savez(f"{folder}/data.npz", x=x, y=y)
        where = [f"task.root={folder}", f"device={device}", f"output={folder}/run"]
        with together():
            finished = run(f"method={method}", *engine, *SIZES, *where, *own)
        first = _network(finished.folder, finished.data_root, None)[0]
        model, start = _arrays(finished.model), _arrays(first)
        weights = {name: start[name] for name, _ in first.named_parameters()}
        rounds = [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    if lost := sum(int(row.get("dropped") or 0) for row in rounds):
        raise RuntimeError(f"{lost} visits were lost, see the log")
    return model, [one for shop in workshop._open.values() for one in shop.recorders], farthest(weights, model)


@contextmanager
def together() -> Iterator[None]:
    """Raise a RuntimeError if, inside the block, the batched engine trained a round one client after another."""
    apart: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        if record.msg == APART:
            apart.append(record.getMessage())
        return True

    FLOWER_LOGGER.addFilter(look)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeFilter(look)
    if apart:
        raise RuntimeError(apart[0])


def on_both_engines(place: Place, line: Lines, method: str, network: str = "") -> None:
    """Write a line for `method` on the local and on the batched engine."""
    for engine in (LOCAL, ["engine=batched"]):
        name = " ".join(filter(None, (method, network, engine[0])))
        line(name, partial(two_rounds, place, method, engine, network))


def two_rounds(place: Place, method: str, engine: Sequence[str], network: str = "") -> Found:
    """Run `method`; return whether its steps were recorded, how many were replayed, and why not.

    And how far its model is from that of the CPU's local engine; on a CPU both engines give the same within rounding.

    Raises
    ------
    RuntimeError
        If a visit was lost, or a round could not be computed together; the log says why.
    """
    expected, moved = on_cpu(method, network)
    model, recorders, _ = ran(method, engine, str(place.device), network)
    return replayed(recorders, place) | {"from CPU": farthest(expected, model), "moved on CPU": moved}


@lru_cache(maxsize=1)
def on_cpu(method: str, network: str = "") -> tuple[dict[str, Any], float]:
    """Return the model of `method` on the CPU's local engine, and how far a weight has moved there."""
    model, _, moved = ran(method, LOCAL, "cpu", network)
    return model, moved


def _arrays(network: Any) -> dict[str, Any]:
    return {name: tensor.double().numpy() for name, tensor in network.state_dict().items()}


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of a number in two models; NaN if one is, unlike ``max``."""
    return float(np.max([np.abs(other[name] - array).max() for name, array in one.items() if array.size]))
