"""Malicious clients against FedCross: accuracy with and without the defence, in-order and lowest similarity.

Digits, MLP 64-32-10, Dirichlet 0.5, alpha 0.99, K = 10 clients drawn of N each round. One JSON line per cell::

    python -m benchmarks.byzantine                                    # the whole table
    python -m benchmarks.byzantine --rows scaling-1 --seeds 1        # one row, one seed
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

from benchmarks.common import Quiet

#: Row -> the settings of the attack, and the size of the federation.
ROWS = {
    "none": (("attack=none",), 10),
    "scaling-1": (("attack=scaling",), 10),
    "stealth-1": (("attack=stealth",), 10),
    "scaling-5": (("attack=scaling", "attack.clients=5"), 50),
    "stealth-2": (("attack=stealth", "attack.clients=2"), 10),
    "stealth-3": (("attack=stealth", "attack.clients=3"), 10),
    "sign-flip-1": (("attack=sign_flip",), 10),
    "noise-1": (("attack=noise",), 10),
    "not-finite-1": (("attack=not_finite",), 10),
}
SELECTIONS = ("in_order", "lowest_similarity", "least_similar_derangement")


def settings(row: str, selection: str, defended: bool, seed: int, rounds: int, output: Path) -> list[str]:
    """Return the configuration of one run."""
    attack, clients = ROWS[row]
    return [
        *("task=digits", "model.hidden=[32]", "partition=dirichlet", "partition.beta=0.5"),
        *(f"partition.clients={clients}", "clients_per_round=10", f"rounds={rounds}", f"evaluate_every={rounds}"),
        *("method=fedcross", "method.alpha=0.99", f"method.selection={selection}", "method.diagnostics_every=0"),
        *("train.lr=0.1", "train.epochs=5", f"seed={seed}", "logger=none", f"checkpoint.every={rounds}"),
        *(f"defence.enabled={str(defended).lower()}", *attack, f"output={output}"),
    ]


def accuracy(settled: list[str]) -> float:
    """Run one federation in this process and return its final test accuracy in [0, 1]."""
    from fedcross.client.app import app
    from fedcross.conf.compose import join
    from fedcross.conf.schema import load
    from fedcross.engines.grid import LocalGrid
    from fedcross.server.session import Session

    config = load(settled)
    clients = int(config.partition.clients)  # type: ignore[attr-defined]
    result = Session(config, LocalGrid(app, clients, {"overrides": join(settled)}), Quiet()).execute()
    return float(result["final_accuracy"])


def cells(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run every chosen cell; yield mean and standard deviation over its seeds."""
    for row, defended, selection in itertools.product(arguments.rows, (False, True), arguments.selections):
        reached = []
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                reached.append(
                    accuracy(settings(row, selection, defended, seed, arguments.rounds, Path(folder) / "run"))
                )
        yield {
            "attack": row,
            "selection": selection,
            "defended": defended,
            "accuracy": round(mean(reached), 4),
            "std": round(stdev(reached), 4) if len(reached) > 1 else None,
            "seeds": arguments.seeds,
            "rounds": arguments.rounds,
        }


def main() -> None:
    """Print one line per cell as it is done."""
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)  # each quarantined upload is a warning
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=list(SELECTIONS[:2]))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--rounds", type=int, default=100)
    for cell in cells(parser.parse_args()):
        print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
