"""The papers' published numbers (``published.csv``) and the search for the numbers that match a configuration.

A cell matches a configuration if task, model, partition, beta and method agree, and if the method's settings are those
of the cell (its ``variant``) or, without a variant, those of the paper. The table does not hold rounds, optimiser and
federation; :func:`deviations` describes where they differ from the paper.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from fedcross.analysis.runs import IGNORED, LENGTH, WHERE, Run, identity

Settings = Mapping[str, Any]
ACCURACY = "test accuracy %"

MODELS = {
    **dict.fromkeys(("lenet5", "cnn_femnist", "fedfusion_cifar", "fedfusion_mnist", "fedfusion_mnist_paper"), "cnn"),
    **dict.fromkeys(("vgg16_bn", "vgg_femnist"), "vgg16"),
    "resnet20_lab": "resnet20",
    "lstm_sent140": "lstm",
}
"""Model names that differ from those in the papers; all other names are equal."""

SELECTIONS = {"lowest": "lowest_similarity", "highest": "highest_similarity", "in-order": "in_order"}

PAPER: dict[str, dict[str, Any]] = {
    "fedcross": {"method.alpha": 0.99, "method.selection": "lowest_similarity", "method.acceleration": None},
    "fedct": {"method.base": "fedavg", "method.broadcast": "consistency"},
}
"""Settings of the published cells without a variant. If a run lacks a setting, the paper's value is assumed."""

FEDCT_MODULES = {"MVKGRL": "method.kappa", "MFA": "method.eta"}
"""The weights of FedCT's two losses: at 0 the module is off. Broadcasting (CAKB) is what remains."""

FEDCROSS_ROUNDS = {"cnn": 2000, "resnet20": 2000, "vgg16": 1000}
TEXT_ROUNDS = {"shakespeare": 1000, "sent140": 3000}
FEDCROSS_CLIENTS = {"femnist": (180, 18), "shakespeare": (128, 12), "sent140": (803, 80)}
"""Clients and clients per round; 100 and 10 for the others."""

POOL = {
    "method.first_stage": 0, "method.mode": "cross", "method.k": None, "method.global_model": "mixed",
    "method.similarity": "cosine", "method.part": "parameters",
}  # fmt: skip
"""How FedCross's paper keeps its pool where a cell has no variant. Its text has K different initial models, its public
code copies of one, as is the default here: ``independent_start`` stands in :func:`deviations` only if it is on."""

TOLERANCE, TOLERANCE_ROUNDS = 1.0, 0.1
"""A mean agrees with a cell that lies in its 95 % interval, or within so many points (or this share of the rounds)."""

NULLS = {"method.k": "one for each client of a round", "train.clip": "none"}
"""What the value null means; all, for other settings."""

WHOLE = {"task.limit": None, "task.limit_test": None, "train.examples": None, "train.precision": "float32"}
"""All data, in full precision; no paper and no public code of a paper states anything else."""

SWITCHES = {
    "defence": ("defence.enabled", False),
    "privacy": ("privacy.enabled", False),
    "attack": ("attack.name", "none"),
    "compression of models": ("compression.down", "float32"),
    "compression of uploads": ("compression.up", "float32"),
}
"""What no paper has: its words, its setting, and the value that stands for none of it."""


Cell = Any
"""A row of ``published.csv``: one number, ``value``, in percent, or in rounds to the accuracy ``target`` in [0, 1]."""


@functools.cache
def cells() -> tuple[Cell, ...]:
    """Return every published cell, in the table's order; what a cell does not have is None, as variant empty."""
    table = pd.read_csv(Path(__file__).with_name("published.csv")).fillna({"variant": ""}).astype(object)
    return tuple(table.where(table.notna(), None).itertuples(index=False))


def accuracy_cells(settings: Settings) -> list[Cell]:
    """Return the published test accuracies of the configuration `settings` (dotted names), the main table first.

    Several tables of a paper can hold the same configuration, and FedCT's do not always agree.
    """
    return [cell for cell in cells() if cell.quantity == ACCURACY and belongs(cell, settings)]


def published_rounds(settings: Settings, target: float) -> Cell | None:
    """Return the published number of rounds to accuracy `target` (in [0, 1]) of a configuration, if there is one."""
    near = (cell for cell in cells() if cell.target is not None and abs(cell.target - target) < 1e-9)
    return next((cell for cell in near if belongs(cell, settings)), None)


def belongs(cell: Cell, settings: Settings) -> bool:
    """Whether `cell` was published for the configuration `settings`."""
    of = settings.get
    beta = of("partition.beta") if of("partition.name") == "dirichlet" else None
    task, model = str(of("task.name")), str(of("model.name"))
    # All of ten clients take part in every round in FedCT's paper alone.
    ten = of("partition.clients") == of("clients_per_round") == 10
    if ten and cell.source.startswith("FedCross"):
        return False
    if task == "femnist" and model == "lenet5":  # the papers' CNN for FEMNIST is a wider one
        return False
    return (
        cell.dataset == ("cifar100" if task.startswith("cifar100") else task)
        and ((ten and cell.source.startswith("FedCT")) or cell.model == MODELS.get(model, model))
        and cell.partition.split(" ")[0] == of("partition.name")
        and (cell.beta is None or (beta is not None and abs(float(beta) - cell.beta) < 1e-9))
        and cell.method == of("method.name")
        and _variant_agrees(cell, settings)
    )


def _variant_agrees(cell: Cell, settings: Settings) -> bool:
    named = {f"method.{name}": value for name, value in (pair.split("=", 1) for pair in cell.variant.split())}
    if cell.method == "fedct":
        ablation = named.pop("method.ablation", None)
        if ablation is not None and not set(FEDCT_MODULES.values()) <= set(settings):
            return False
        on = [name for name, weight in FEDCT_MODULES.items() if float(settings.get(weight, 1)) > 0]
        if (ablation or "CAKB+MVKGRL+MFA") != "+".join(["CAKB", *on]):
            return False
    usual = PAPER.get(cell.method, {})
    # Each setting of a cell must be in the configuration or be the paper's default; an ablation is never guessed.
    if any(name not in settings and usual.get(name) != value for name, value in named.items()):
        return False
    return all(_equal(settings[name], value) for name, value in (usual | named).items() if name in settings)


def _equal(mine: object, paper: object) -> bool:
    if paper is None:
        return mine in (None, "none", "", 0, False)
    if isinstance(mine, (int, float)) and not isinstance(mine, bool):
        return abs(float(mine) - float(str(paper))) < 1e-9
    return SELECTIONS.get(str(mine), str(mine)) == paper


def deviations(cell: Cell, settings: Settings) -> list[str]:
    """Return texts on where `settings` differ from the protocol of the cell's paper: ``rounds 200 (paper 2000)``."""
    differing = [
        f"{name.split('.')[-1]} {settings[name]} (paper {NULLS.get(name, 'all') if value is None else value})"
        for name, value in (_protocol(cell) | WHOLE | {"train.clip": None}).items()
        if name in settings and settings[name] != value
    ]
    model = str(settings.get("model.name", cell.model))
    if MODELS.get(model, model) != cell.model:
        differing.insert(0, f"model {model} (paper {cell.model})")
    if any(float(width) < 1 for width in settings.get("method.widths") or ()):
        differing.append(f"widths {', '.join(map(str, settings['method.widths']))} (paper full models)")
    if settings.get("method.independent_start"):
        differing.append("independent initial models (public code copies of one)")
    for what, (name, off) in SWITCHES.items():
        if settings.get(name, off) != off:
            differing.append(f"{what} {'on' if settings[name] is True else settings[name]} (paper none)")
    if cell.dataset == "cifar100":
        words = (settings.get("task.labels"), settings.get("task.name"))
        coarse = bool(settings.get("task.coarse")) or any("coarse" in str(word) for word in words)
        # Inferred: three repositories of FedCross's first author load the 20 coarse classes.
        if coarse != cell.source.startswith("FedCross"):
            differing.append(f"{'coarse' if coarse else 'fine'} labels (paper {'fine' if coarse else 'coarse'})")
    return differing


def _protocol(cell: Cell) -> dict[str, Any]:
    if cell.source.startswith("FedCross"):
        rounds = TEXT_ROUNDS.get(cell.dataset) or FEDCROSS_ROUNDS.get(cell.model)
        clients, drawn = FEDCROSS_CLIENTS.get(cell.dataset, (100, 10))
        paper: dict[str, Any] = {"train.lr": 0.01, "train.momentum": 0.5, "train.epochs": 5, "train.batch": 50}
        paper |= {"clients_per_round": drawn, "rounds": rounds, "partition.clients": clients}
        return paper | (POOL if cell.method == "fedcross" else {})
    if cell.source.startswith("FedCT"):
        paper = {"train.lr": 0.01, "train.epochs": 10, "train.batch": 64, "clients_per_round": 10}
        paper |= {"train.momentum": 0.9}  # inferred from the authors' code for another method
        return paper | {"rounds": 100, "partition.clients": 10}
    return {}


def verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Return every published cell beside the measured one.

    Columns: those of the :class:`Cell` (``published`` is its value), ``target``, ``ours`` (mean over seeds: best mean
    of 10 evaluations in percent, or rounds), ``low`` and ``high`` (95 % interval of the mean), ``seeds``, ``rounds``,
    ``published_rounds``, ``difference``, ``deviations`` from the paper, and ``verdict``: "agrees", "differs", "too
    short" (less than half of the published rounds), "other settings" (with deviations) or "no data". Only the first
    two have a difference.
    """
    empty: dict[str, Any] = dict.fromkeys(("ours", "low", "high", "difference", "rounds"), float("nan"))
    empty |= {"deviations": "", "seeds": 0, "verdict": "no data"}
    rows = []
    for cell in cells():
        planned = _protocol(cell).get("rounds")
        facts = {**cell._asdict(), "published": cell.value, "published_rounds": planned}
        rows.append({**facts, **empty, **_measured(cell, runs, planned)})
    return pd.DataFrame(rows).drop(columns=["value", "spread"])


def _measured(cell: Cell, runs: Sequence[Run], planned: int | None) -> dict[str, Any]:
    """Return the measured columns of :func:`verdicts`, Student's interval from three values on; none without a run."""
    chosen, rounds, texts = _nearest(cell, runs, planned)
    if not chosen:
        return {}
    measured = [run.reach(cell.target) if cell.target else 100 * run.smoothed.mean for run in chosen]
    ours = pd.Series(measured, dtype=float).dropna()
    half = float(stats.t.ppf(0.975, len(ours) - 1)) * float(ours.sem()) if len(ours) > 2 else float("nan")
    low, high = float(ours.mean()) - half, float(ours.mean()) + half
    found = {"seeds": len(chosen), "rounds": rounds, "deviations": ", ".join(texts)}
    found |= {"ours": ours.mean(), "low": low, "high": high}
    if planned and 2 * rounds < planned:
        return {**found, "verdict": "too short"}
    if texts:
        return {**found, "verdict": "other settings"}
    difference = float(ours.mean()) - cell.value
    near = TOLERANCE if cell.target is None else TOLERANCE_ROUNDS * cell.value
    agrees = abs(difference) <= near or low <= cell.value <= high
    return {**found, "difference": difference, "verdict": "agrees" if agrees else "differs"}


def _nearest(cell: Cell, runs: Sequence[Run], planned: int | None) -> tuple[list[Run], int, list[str]]:
    """Return the runs that stand for `cell`, cut to equal lengths, their rounds and their deviations.

    Fewest deviations first; then half of the `planned` rounds, more seeds, more rounds.
    """
    seeds: dict[tuple[Any, ...], dict[int, Run]] = {}
    for run in runs if cell.quantity == ACCURACY or cell.target is not None else ():
        if belongs(cell, run.settings):
            longest = seeds.setdefault(identity(run, (*IGNORED, *WHERE, *LENGTH)), {})
            longest[run.seed] = max(longest.get(run.seed, run), run, key=lambda one: one.rounds)
    choices = []
    for key, group in seeds.items():
        settings = next(iter(group.values())).settings
        texts = [text for text in deviations(cell, settings) if not text.startswith("rounds ")]
        for length in {min(run.rounds, planned or run.rounds) for run in group.values()}:
            long = [run.until(length) for run in group.values() if run.rounds >= length]
            choices.append(((-len(texts), 2 * length >= (planned or 0), len(long), length, key), long, texts))
    if not choices:
        return [], 0, []
    (*_, length, _), chosen, texts = max(choices, key=lambda choice: choice[0])
    cadence = max(run.cadence for run in chosen)
    return [run if run.cadence == cadence else run.every(cadence) for run in chosen], length, texts
