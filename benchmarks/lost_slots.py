"""FedCross with lost clients: does a lost slot's model belong into the global mean?

A slot whose client is lost keeps the model that was sent. No client gets the global model, so training does not depend
on the choice: one run scores both means after each evaluated round. ``all`` is the mean of the pool, ``live`` that of
the slots whose upload was accepted in the round. One JSON line per seed, one with the means::

    python -m benchmarks.lost_slots task=digits
    python -m benchmarks.lost_slots --every 5 task=cifar10 rounds=60     # data in FEDCROSS_DATA
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from statistics import mean
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from benchmarks.common import Quiet

#: Evaluations at the end of a run whose mean stands for its final accuracy.
LAST = 10
#: Seed of the losses, the same in every run.
LOSSES = 7


def lossy(share: float) -> ClientApp:
    """Return the client app; a visit is lost with probability `share`, drawn by (round, client)."""
    from fedcross.client.app import app as honest
    from fedcross.core.randomness import stream

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        asked: Any = message.content.config_records["config"]
        if stream(LOSSES, "drop", asked["round"], asked["client"]).random() < share:
            raise RuntimeError("link down")
        return honest(message, context)

    return app


def scores(overrides: Sequence[str], share: float, every: int) -> dict[str, Any]:
    """Run one federation; return the accuracies of both means by round, and the share of visits that were lost."""
    from fedcross.conf.compose import join
    from fedcross.conf.schema import load
    from fedcross.engines.grid import LocalGrid
    from fedcross.server.session import Session

    config = load(overrides)
    grid = LocalGrid(lossy(share), int(config.partition.clients), {"overrides": join(overrides)})  # type: ignore[attr-defined]
    session = Session(config, grid, Quiet())
    pool = session.method.pool  # type: ignore[attr-defined]
    live: list[int] = []
    session.method.observer = lambda _, uploads: live.extend(upload.slot for upload in uploads)
    found: dict[str, Any] = {"all": [], "live": [], "lost": 0.0}
    for number in range(1, config.rounds + 1):
        live.clear()
        session.method.run_round(number, grid)
        found["lost"] += (1 - len(live) / config.clients_per_round) / config.rounds
        if number % every == 0 and live:
            for name, members in (("all", None), ("live", live)):
                found[name].append(session.evaluator.score(pool.mean(members=members)).accuracy)
    return found


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Return what :func:`scores` found as means: over the first half of all evaluations and over the last ones."""
    result = {"lost": found["lost"]}
    for name in ("all", "live"):
        curve = found[name]
        result |= {f"{name}_first_half": mean(curve[: len(curve) // 2]), f"{name}_last": mean(curve[-LAST:])}
    return {name: round(value, 4) for name, value in result.items()}


def main() -> None:
    """Print one line per seed as it is done, and one with the means over the seeds."""
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)  # each lost visit is a warning
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--share", type=float, default=0.3, help="probability that a visit is lost")
    parser.add_argument("--every", type=int, default=1, help="rounds between evaluations")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("overrides", nargs="*", help="settings, as for fedcross")
    arguments = parser.parse_args()
    lines = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            more = [f"seed={seed}", "method.diagnostics_every=0", "logger=none", f"output={folder}/run"]
            found = scores(["method=fedcross", *arguments.overrides, *more], arguments.share, arguments.every)
        lines.append(summary(found))
        print(json.dumps({"seed": seed, **lines[-1]}), flush=True)
    print(json.dumps({"mean": {name: round(mean(line[name] for line in lines), 4) for name in lines[0]}}))


if __name__ == "__main__":
    main()
