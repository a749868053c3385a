"""The papers' published numbers (``published.csv``) and the search for the numbers that match a configuration.

A cell matches a configuration if task, model, partition, beta and method agree, and if the method's settings are those
of the cell (its ``variant``) or, without a variant, those of the paper. The table does not hold rounds, optimiser and
federation; :func:`deviations` describes where they differ from the paper.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pandas as pd

from fedcross.analysis.labels import IGNORED, LENGTH, WHERE, identity
from fedcross.analysis.runs import Run

ACCURACY = "test accuracy %"

MODELS = {
    "lenet5": "cnn", "cnn_femnist": "cnn", "femnist_cnn": "cnn", "fedfusion_cnn": "cnn", "fedfusion_cifar": "cnn",
    "fedfusion_mnist": "cnn", "fedfusion_mnist_paper": "cnn",
    "resnet20_lab": "resnet20",
    "vgg16_bn": "vgg16", "vgg16bn": "vgg16", "vgg_femnist": "vgg16", "femnist_vgg": "vgg16",
    "lstm_shakespeare": "lstm", "lstm_sent140": "lstm", "shakespeare_lstm": "lstm", "sent140_lstm": "lstm",
}  # fmt: skip
"""Model names that differ from those in the papers; all other names are equal."""

SELECTIONS = {"lowest": "lowest_similarity", "highest": "highest_similarity", "in-order": "in_order"}

PAPER: dict[str, dict[str, Any]] = {
    "fedcross": {"method.alpha": 0.99, "method.selection": "lowest_similarity", "method.acceleration": None},
    "fedct": {"method.base": "fedavg", "method.broadcast": "consistency"},
}
"""Settings of the published cells without a variant. If a run lacks a setting, the paper's value is assumed."""

FEDCT_MODULES = {"MVKGRL": "method.kappa", "MFA": "method.eta"}
"""The weights of FedCT's two losses: at 0 the module is off. Broadcasting (CAKB) is what remains."""

FEDCT_WHOLE = "CAKB+MVKGRL+MFA"

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


@dataclass(frozen=True)
class Cell:
    """One published number: percent for an accuracy, rounds for a number of rounds."""

    source: str
    model: str
    dataset: str
    partition: str
    beta: float | None
    method: str
    variant: str
    quantity: str
    value: float
    spread: float | None

    @property
    def target(self) -> float | None:
        """The accuracy in [0, 1] that the cell's number of rounds reaches; None for a cell of an accuracy."""
        numbers = [float(n) for n in re.findall(r"\d+\.\d+|\d+(?= %)", self.quantity)]
        if not self.quantity.startswith("rounds to") or not numbers:
            return None
        if self.source == "FedCT Table IV":  # one target per data set
            numbers = numbers[:1] if self.dataset == "cifar10" else numbers[1:2]
        elif self.source == "FedCT Table VI":  # two targets per data set: beta .1 and .5
            pair = numbers[:2] if self.dataset == "cifar10" else numbers[2:4]
            numbers = pair[:1] if self.beta == 0.1 else pair[1:]
        return numbers[0] / 100


@functools.cache
def cells() -> tuple[Cell, ...]:
    """Return every published cell, in the table's order."""
    with resources.files("fedcross.analysis").joinpath("published.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file).astype(object)
    table["variant"] = table["variant"].fillna("")
    return tuple(Cell(**row) for row in table.where(table.notna(), None).to_dict("records"))


def accuracy_cells(settings: Mapping[str, Any]) -> list[Cell]:
    """Return the published test accuracies of the configuration `settings` (dotted names), the main table first.

    Several tables of a paper can hold the same configuration, and FedCT's do not always agree.
    """
    return [cell for cell in cells() if cell.quantity == ACCURACY and belongs(cell, settings)]


def published_rounds(settings: Mapping[str, Any], target: float) -> Cell | None:
    """Return the published number of rounds to accuracy `target` (in [0, 1]) of a configuration, if there is one."""
    for cell in cells():
        if cell.target is not None and abs(cell.target - target) < 1e-9 and belongs(cell, settings):
            return cell
    return None


def belongs(cell: Cell, settings: Mapping[str, Any]) -> bool:
    """Whether `cell` was published for the configuration `settings`."""
    of = settings.get
    beta = of("partition.beta") if of("partition.name") == "dirichlet" else None
    same_beta = cell.beta is None or (beta is not None and abs(float(beta) - cell.beta) < 1e-9)
    task = str(of("task.name"))
    model = str(of("model.name"))
    if task == "femnist" and model == "lenet5":  # the papers' CNN for FEMNIST is a wider one
        return False
    if cell.source.startswith("FedCross") and _federation_of_fedct(settings):
        return False
    own_model = cell.source.startswith("FedCT") and _federation_of_fedct(settings)  # deviations() names it
    return (
        cell.dataset == ("cifar100" if task.startswith("cifar100") else task)
        and (own_model or cell.model == MODELS.get(model, model))
        and cell.partition.split(" ")[0] == of("partition.name")
        and same_beta
        and cell.method == of("method.name")
        and _variant_agrees(cell, settings)
    )


def _federation_of_fedct(settings: Mapping[str, Any]) -> bool:
    """Whether all of ten clients take part in every round, as in FedCT's paper alone."""
    return settings.get("partition.clients") == settings.get("clients_per_round") == 10


def _variant_agrees(cell: Cell, settings: Mapping[str, Any]) -> bool:
    named = dict(pair.split("=", 1) for pair in cell.variant.split())
    if cell.method == "fedct":
        ablation = named.pop("ablation", None)
        if ablation is not None and not set(FEDCT_MODULES.values()) <= set(settings):
            return False
        if (ablation or FEDCT_WHOLE) != fedct_modules(settings):
            return False
    expected = PAPER.get(cell.method, {}) | {f"method.{name}": value for name, value in named.items()}
    # Each setting of a cell must be in the configuration or be the paper's default; an ablation is never guessed.
    if any(f"method.{n}" not in settings and PAPER.get(cell.method, {}).get(f"method.{n}") != named[n] for n in named):
        return False
    return all(_equal(settings[name], value) for name, value in expected.items() if name in settings)


def fedct_modules(settings: Mapping[str, Any]) -> str:
    """Return FedCT's active modules as its Table III names them: ``CAKB+MVKGRL+MFA`` for the whole method."""
    active = (name for name, weight in FEDCT_MODULES.items() if float(settings.get(weight, 1)) > 0)
    return "+".join(["CAKB", *active])


def _equal(mine: object, paper: object) -> bool:
    if paper is None:
        return mine in (None, "none", "", 0, False)
    if isinstance(mine, (int, float)) and not isinstance(mine, bool):
        return abs(float(mine) - float(str(paper))) < 1e-9
    return SELECTIONS.get(str(mine), str(mine)) == paper


def deviations(cell: Cell, settings: Mapping[str, Any]) -> list[str]:
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
    empty = dict.fromkeys(("ours", "low", "high", "difference", "rounds"), float("nan")) | {"deviations": ""}
    return pd.DataFrame([{**_cell_columns(cell), **empty, **_verdict(cell, runs)} for cell in cells()])


def _cell_columns(cell: Cell) -> dict[str, Any]:
    columns = {name: value for name, value in vars(cell).items() if name not in ("value", "spread")}
    return {**columns, "published": cell.value, "target": cell.target}


def _verdict(cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the measured columns of :func:`verdicts`."""
    planned = _protocol(cell).get("rounds")
    chosen, rounds, texts = _nearest(cell, runs, planned)
    if not chosen:
        return {"seeds": 0, "published_rounds": planned, "verdict": "no data"}
    measured = [run.reach(cell.target) if cell.target else 100 * run.smoothed.mean for run in chosen]
    ours = pd.Series(measured, dtype=float).dropna()
    told = {"seeds": len(chosen), "rounds": rounds, "published_rounds": planned, "deviations": ", ".join(texts)}
    low, high = _interval(ours)
    told |= {"ours": ours.mean(), "low": low, "high": high}
    if planned and 2 * rounds < planned:
        return {**told, "verdict": "too short"}
    if texts:
        return {**told, "verdict": "other settings"}
    difference = float(ours.mean()) - cell.value
    near = TOLERANCE if cell.target is None else TOLERANCE_ROUNDS * cell.value
    agrees = abs(difference) <= near or low <= cell.value <= high
    return {**told, "difference": difference, "verdict": "agrees" if agrees else "differs"}


def _nearest(cell: Cell, runs: Sequence[Run], planned: int | None) -> tuple[list[Run], int, list[str]]:
    """Return the runs that stand for `cell`, cut to equal lengths, their rounds and their deviations.

    Fewest deviations first; then half of the `planned` rounds, more seeds, more rounds.
    """
    seeds: dict[tuple[Any, ...], dict[int, Run]] = {}
    texts: dict[tuple[Any, ...], list[str]] = {}
    for run in runs:
        if (cell.quantity == ACCURACY or cell.target is not None) and belongs(cell, run.settings):
            key = identity(run, (*IGNORED, *WHERE, *LENGTH))
            texts[key] = [text for text in deviations(cell, run.settings) if not text.startswith("rounds ")]
            known = seeds.setdefault(key, {}).setdefault(run.seed, run)
            seeds[key][run.seed] = max(known, run, key=lambda one: one.rounds)
    choices = []
    for key, group in seeds.items():
        for length in {min(run.rounds, planned or run.rounds) for run in group.values()}:
            count = sum(run.rounds >= length for run in group.values())
            choices.append((-len(texts[key]), 2 * length >= (planned or 0), count, length, key))
    if not choices:
        return [], 0, []
    *_, length, key = max(choices)
    chosen = [run.until(length) for run in seeds[key].values() if run.rounds >= length]
    cadence = max(run.cadence for run in chosen)
    return [run if run.cadence == cadence else run.every(cadence) for run in chosen], length, texts[key]


def _interval(values: pd.Series[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, Student's t; NaN for fewer than three values."""
    from scipy import stats

    if len(values) < 3:
        return float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, len(values) - 1)) * float(values.sem())
    return float(values.mean()) - half, float(values.mean()) + half
