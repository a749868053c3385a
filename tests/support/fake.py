"""Run folders as `fedcross` writes them, made up for the tests of analysis."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def config(method: str = "fedavg", seed: int = 1, rounds: int = 5, **changes: Any) -> dict[str, Any]:
    """Return a configuration; `changes` are dotted names with `__` for the dot."""
    values: dict[str, Any] = {
        "method": {"name": method},
        "task": {"name": "cifar10"},
        "model": {"name": "cnn"},
        "partition": {"name": "dirichlet", "beta": 1.0, "clients": 100},
        "train": {"lr": 0.01, "momentum": 0.5, "epochs": 5, "batch": 50},
        "engine": {"name": "local"},
        "seed": seed,
        "rounds": rounds,
        "clients_per_round": 10,
    }
    if method == "fedcross":
        values["method"] |= {"alpha": 0.99, "selection": "lowest"}
    for name, value in changes.items():
        head, _, tail = name.partition("__")
        if tail:
            values[head][tail] = value
        else:
            values[head] = value
    return values


def write_run(
    folder: Path,
    accuracy: Sequence[float | None],
    values: Mapping[str, Any] | None = None,
    finished: bool = True,
    seconds: float = 2.0,
) -> Path:
    """Write a run folder whose rounds 1, 2, ... have the given test accuracies."""
    settings = dict(values or config(rounds=len(accuracy)))
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"seed={settings['seed']}"]))
    lines = [
        {
            "round": number,
            "test_accuracy": value,
            "test_loss": None if value is None else 1 - value,
            "train_loss": 1.0 / number,
            "clients": 10,
            "dropped": 0,
            "rejected": {"non_finite": 1},
            "exchanges": 1,
            "bytes_down": 1_000_000,
            "bytes_up": 500_000,
            "seconds": seconds,
            "seconds_training": seconds * 0.9,
            "seconds_aggregation": seconds * 0.05,
            "pool_similarity_mean": 0.9,
            "pool_spread": 0.1,
        }
        for number, value in enumerate(accuracy, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        known = [a for a in accuracy if a is not None]
        result = {
            "method": settings["method"]["name"],
            "seed": settings["seed"],
            "rounds": len(accuracy),
            "final_accuracy": known[-1] if known else None,
            "commit": "0123abc",
            "machine": "x86_64 Linux",
            "engine": "local",
            "device": "cpu",
            "versions": {"flwr": "1.41.0", "torch": "2.15.0"},
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder
