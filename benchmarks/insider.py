"""What one device of ten can do that sees all other replies of its round, with the defence on.

Digits, 10 clients, all in each round, 5 epochs. The device replaces its update by the reversed sum of all others or, if
it climbs, by a way on which the loss of its own examples grows; both at .999 of the others' median length, the longest
that the defence leaves as it is. One JSON line per cell::

    python -m benchmarks.insider                                          # the first table of docs/reliability.md
    python -m benchmarks.insider --attacks none climbs --network deep     # the second
    python -m benchmarks.insider --methods fedavg --betas .1 --seeds 1    # one method, one seed
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import numpy as np

from fedcross.strategies.defence.rules import usual
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.wire.protocol import Upload

#: The device, and what the median leaves it.
DEVICE, LENGTH = 0, 0.999
#: Attack -> the number of examples that it claims; None for its own. With a false one FedNova's steps are false too.
ATTACKS = {"none": None, "own count": None, "false count": 2**40, "climbs": None}
#: Steps of the climb, each an eighth of the way that it may go.
STEPS = 40
#: Network -> its hidden layers and the learning rate.
NETWORKS = {"small": ("[32]", 0.05), "deep": ("[32,32]", 0.1)}
#: Method -> its settings.
METHODS = {
    **{name: (f"method={name}",) for name in ("fedavg", "fedcross", "fednova", "scaffold", "fedexp", "feddyn")},
    "fedcross, hardened": ("method=fedcross", "method.selection=least_similar_derangement"),
    **{name: (f"method={name}",) for name in ("masterpull", "daisychain", "fedmr", "fedfan")},
}
#: What an update becomes: (the model that was sent, the others' updates) -> update.
Lie = Callable[[Arrays, Sequence[Arrays]], Arrays]


def settings(method: str, beta: float, seed: int, rounds: int, output: Path, network: str = "small") -> list[str]:
    """Return the configuration of one run."""
    hidden, rate = NETWORKS[network]
    return [
        *("task=digits", f"model.hidden={hidden}", "partition=dirichlet", f"partition.beta={beta}"),
        *("partition.min_size=5", "partition.clients=10", "clients_per_round=10", f"rounds={rounds}"),
        *(*METHODS[method], f"seed={seed}", f"train.lr={rate}", "train.epochs=5", "defence.enabled=true"),
        *("logger=none", f"checkpoint.every={rounds}", "engine=local", "engine.workers=1", f"output={output}"),
    ]


def reversed_sum(updates: Sequence[Arrays]) -> Arrays:
    """Return minus the sum of `updates`, at ``LENGTH`` times their median length, in float64."""
    return _fitted({name: -np.sum([update[name] for update in updates], axis=0) for name in updates[0]}, updates)


def _fitted(update: Arrays, others: Sequence[Arrays]) -> Arrays:
    """Return `update` at ``LENGTH`` times the median length of `others`."""
    length = LENGTH * usual([_length(other) for other in others])[0]
    return {name: array * (length / max(_length(update), 1e-30)) for name, array in update.items()}


def climber(chosen: Sequence[str]) -> Lie:
    """Return how the loss of the device's own examples grows, in a run of the configuration `chosen`.

    Steps along the gradient that stay within the others' median length; the device's examples are its own.
    """
    import torch

    from fedcross.conf.schema import load

    config = load(chosen)
    data = config.load_data()
    network, _ = config.network(data.task)
    inputs, labels = data.client(DEVICE, torch.device("cpu"))

    def climb(model: Arrays, others: Sequence[Arrays]) -> Arrays:
        network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in model.items()})
        start = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        most = LENGTH * usual([_length(other) for other in others])[0]
        for _ in range(STEPS):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), labels).backward()  # type: ignore[no-untyped-call]
            _step(network, start, most)
        way = {n: (w.detach() - start[n]).numpy().astype(np.float64) for n, w in network.named_parameters()}
        return _fitted(way, others)

    return climb


def _step(network: Any, start: dict[str, Any], most: float) -> None:
    """Go up an eighth of `most` along the gradient, and back to `most` from `start` if that is too far."""
    import torch

    weights = dict(network.named_parameters())
    slope = float(torch.sqrt(sum((weight.grad**2).sum() for weight in weights.values())))
    with torch.no_grad():
        for weight in weights.values():
            weight += most / 8 / max(slope, 1e-12) * weight.grad
        gone = float(torch.sqrt(sum(((weight - start[name]) ** 2).sum() for name, weight in weights.items())))
        if gone > most:
            for name, weight in weights.items():
                weight.copy_(start[name] + (weight - start[name]) * (most / gone))


def _false(upload: Upload) -> dict[str, Arrays]:
    """Return the extras of `upload`; one step in place of FedNova's number, so that each of its steps is long."""
    steps = {"steps": {"tau": np.ones_like(upload.extras["steps"]["tau"])}} if "steps" in upload.extras else {}
    return {**upload.extras, **steps}


def _length(update: Arrays) -> float:
    return float(np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in update.values())))


@contextlib.contextmanager
def insider(claimed: int | None, lie: Lie = lambda _, others: reversed_sum(others)) -> Iterator[None]:
    """Let :data:`DEVICE` replace its reply once all of a round are there."""
    defend: Callable[..., list[Upload]] = Method._defend

    def lied(self: Method[Any], uploads: list[Upload]) -> list[Upload]:
        sent = self._sent
        others = [
            {name: one.arrays[name].astype(np.float64) - sent[one.slot][name] for name in self.parameter_names}
            for one in uploads
            if one.client != DEVICE
        ]
        found = list(uploads)
        for place, upload in enumerate(uploads):
            if upload.client == DEVICE and others:
                model = sent[upload.slot]
                false = lie(model, others)
                arrays = {**upload.arrays, **{n: (model[n] + false[n]).astype(model[n].dtype) for n in false}}
                found[place] = replace(upload, arrays=arrays)
                if claimed:
                    found[place] = replace(found[place], num_examples=claimed, extras=_false(upload))
        return defend(self, found)

    with mock.patch.object(Method, "_defend", lied):
        yield


def run(method: str, beta: float, attack: str, seed: int, rounds: int, network: str) -> dict[str, float]:
    """Run one federation in this process; return the mean of its last five accuracies and its quarantined replies."""
    from fedcross.server.api import run as federation

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        chosen = settings(method, beta, seed, rounds, Path(folder) / "run", network)
        if attack == "climbs":
            stack.enter_context(insider(None, climber(chosen)))
        elif attack != "none":
            stack.enter_context(insider(ATTACKS[attack]))
        with contextlib.redirect_stdout(sys.stderr):
            done = federation(*chosen)
        lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    last = [line["test_accuracy"] for line in lines[-5:]]
    return {"accuracy": mean(last), "quarantined": sum(line["rejected"].get("quarantined", 0) for line in lines)}


def main() -> None:
    """Print one line per cell as it is done."""
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)  # each quarantined upload is a warning
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--betas", nargs="+", type=float, default=[0.5, 0.1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--network", choices=NETWORKS, default="small")
    wanted = parser.parse_args()
    for method, beta, attack in itertools.product(wanted.methods, wanted.betas, wanted.attacks):
        found = [run(method, beta, attack, seed, wanted.rounds, wanted.network) for seed in wanted.seeds]
        cell = {"method": method, "beta": beta, "attack": attack, "rounds": wanted.rounds, "seeds": wanted.seeds}
        cell |= {"network": wanted.network}
        reached = {name: [round(one[name], 4) for one in found] for name in found[0]}
        print(json.dumps(cell | reached), flush=True)


if __name__ == "__main__":
    main()
