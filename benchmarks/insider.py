"""What one device of ten can do that sees all other replies of its round, with the defence on.

Digits, MLP 64-32-10, 10 clients, all in each round, 5 epochs, learning rate .05. The device replaces its update by the
reversed sum of all others, at .999 of their median length: the longest that the defence leaves as it is. One JSON
line per cell::

    python -m benchmarks.insider                                          # the table of docs/reliability.md
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

from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.defence import usual
from fedcross.strategies.wire.protocol import Upload

#: The device, and what the median leaves it.
DEVICE, LENGTH = 0, 0.999
#: Attack -> the number of examples that it claims; None for its own. With a false one FedNova's steps are false too.
ATTACKS = {"none": None, "own count": None, "false count": 2**40}
#: Method -> its settings.
METHODS = {
    **{name: (f"method={name}",) for name in ("fedavg", "fedcross", "fednova", "scaffold", "fedexp", "feddyn")},
    "fedcross, hardened": ("method=fedcross", "method.selection=least_similar_derangement"),
}


def settings(method: str, beta: float, seed: int, rounds: int, output: Path) -> list[str]:
    """Return the configuration of one run."""
    return [
        *("task=digits", "model.hidden=[32]", "partition=dirichlet", f"partition.beta={beta}", "partition.min_size=5"),
        *("partition.clients=10", "clients_per_round=10", f"rounds={rounds}", *METHODS[method], f"seed={seed}"),
        *("train.lr=0.05", "train.epochs=5", "defence.enabled=true", "logger=none", f"checkpoint.every={rounds}"),
        *("engine=local", "engine.workers=1", f"output={output}"),
    ]


def reversed_sum(updates: Sequence[Arrays]) -> Arrays:
    """Return minus the sum of `updates`, at ``LENGTH`` times their median length, in float64."""
    total = {name: -np.sum([update[name] for update in updates], axis=0) for name in updates[0]}
    length = LENGTH * usual([_length(update) for update in updates])[0]
    return {name: array * (length / max(_length(total), 1e-30)) for name, array in total.items()}


def _false(upload: Upload) -> dict[str, Arrays]:
    """Return the extras of `upload`; one step in place of FedNova's number, so that each of its steps is long."""
    steps = {"steps": {"tau": np.ones_like(upload.extras["steps"]["tau"])}} if "steps" in upload.extras else {}
    return {**upload.extras, **steps}


def _length(update: Arrays) -> float:
    return float(np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in update.values())))


@contextlib.contextmanager
def insider(claimed: int | None) -> Iterator[None]:
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
                model, false = sent[upload.slot], reversed_sum(others)
                arrays = {**upload.arrays, **{n: (model[n] + false[n]).astype(model[n].dtype) for n in false}}
                found[place] = replace(upload, arrays=arrays)
                if claimed:
                    found[place] = replace(found[place], num_examples=claimed, extras=_false(upload))
        return defend(self, found)

    with mock.patch.object(Method, "_defend", lied):
        yield


def run(method: str, beta: float, attack: str, seed: int, rounds: int) -> dict[str, float]:
    """Run one federation in this process; return the mean of its last five accuracies and its quarantined replies."""
    from fedcross.server.api import run as federation

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if attack != "none":
            stack.enter_context(insider(ATTACKS[attack]))
        with contextlib.redirect_stdout(sys.stderr):
            done = federation(*settings(method, beta, seed, rounds, Path(folder) / "run"))
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
    wanted = parser.parse_args()
    for method, beta, attack in itertools.product(wanted.methods, wanted.betas, wanted.attacks):
        found = [run(method, beta, attack, seed, wanted.rounds) for seed in wanted.seeds]
        cell = {"method": method, "beta": beta, "attack": attack, "rounds": wanted.rounds, "seeds": wanted.seeds}
        reached = {name: [round(one[name], 4) for one in found] for name in found[0]}
        print(json.dumps(cell | reached), flush=True)


if __name__ == "__main__":
    main()
