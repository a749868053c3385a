"""Linear centred kernel alignment of layers: one model before and after an exchange, and models of different clients.

Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019: CKA is 1 if two representations
agree up to rotation and scale, and near 0 if they are unrelated.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import seaborn
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcross.analysis.subject import Options, RecordedExchange, Subject

Floats = NDArray[np.float64]


def gram(x: NDArray[np.generic]) -> Floats:
    """Return the centred Gram matrix (n, n) of representations `x`, (n, ...), scaled to Frobenius norm 1."""
    rows = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
    rows = rows - rows.mean(axis=0)
    product = rows @ rows.T
    norm = np.linalg.norm(product)
    return np.asarray(product / norm if norm > 0 else product)


def similarities(first: list[Floats], second: list[Floats]) -> Floats:
    """Return the linear CKA in [0, 1] of every pair of two lists of Gram matrices, shape (first, second)."""
    return np.array([[float(np.sum(a * b)) for b in second] for a in first])


def layers(model: nn.Module, inputs: Tensor) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of all convolutions, linear and recurrent layers, (n, ...) by name, in forward order."""
    found: dict[str, NDArray[np.float32]] = {}

    def keep(_module: nn.Module, _inputs: Any, output: Any, name: str) -> None:
        found[name] = (output[0] if isinstance(output, tuple) else output).numpy()

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.RNNBase):
            module.register_forward_hook(partial(keep, name=name))
    with torch.no_grad():
        model(inputs)
    return found


def between(matrix: Floats) -> float:
    """Return the mean over pairs of different models; NaN for fewer than two."""
    upper = matrix[np.triu_indices(len(matrix), 1)]
    return float(upper.mean()) if upper.size else float("nan")


def compare(subject: Subject, number: int, examples: int) -> dict[str, dict[str, Floats]]:
    """Return comparison -> layer -> CKA of pairs of models, (models, models), of round `number`.

    The comparisons are ``before`` and ``after`` the exchanges, between clients, and ``same``: each model before (rows)
    with those after; its diagonal is one model. With a single exchange there is only ``before``.
    """
    exchanges = subject.exchanges(number)
    inputs = subject.inputs(subject.sample(examples))
    slots = [slot for slot in exchanges[0].models if slot in exchanges[-1].models]

    def grams(exchange: RecordedExchange) -> dict[str, list[Floats]]:
        outputs = [layers(subject.network(exchange.models[slot]), inputs) for slot in slots]
        return {name: [gram(one[name]) for one in outputs] for name in outputs[0]}

    before = grams(exchanges[0])
    pairs = {"before": (before, before)}
    if len(exchanges) > 1:
        after = grams(exchanges[-1])
        pairs |= {"after": (after, after), "same": (before, after)}
    return {kind: {name: similarities(a[name], b[name]) for name in a} for kind, (a, b) in pairs.items()}


def means(found: dict[str, dict[str, Floats]]) -> pd.DataFrame:
    """Return the mean CKA: a row for each layer, a column for each comparison."""
    mean: dict[str, Any] = {"before": between, "after": between, "same": lambda matrix: float(matrix.diagonal().mean())}
    return pd.DataFrame({kind: {name: mean[kind](m) for name, m in found[kind].items()} for kind in found})


def draw(subject: Subject, options: Options) -> tuple[dict[str, Figure], pd.DataFrame]:
    """Return mean CKA by layer and heat maps of the embedding's, a row for each round, and the table of means."""
    found = {number: compare(subject, number, options.examples) for number in subject.rounds(options.rounds)}
    figure, grid = subject.panels("Linear CKA", len(found), 3, (13.5, 3.9 * len(found)))
    for row, (number, one) in zip(grid, found.items(), strict=True):
        means(one).plot(ax=row[0], marker="o", ylim=(0, 1.02), ylabel="CKA", title=f"round {number}", rot=30)
        layer = [*one["before"]][-2:][0]  # the embedding: the layer before the classifier
        for axes, kind in zip(row[1:], ("before", "after"), strict=True):
            axes.set_axis_off()
            if kind in one:
                axes.set_axis_on()
                seaborn.heatmap(one[kind][layer], vmin=0, vmax=1, cmap="viridis", square=True, ax=axes)
                axes.set_title(f"round {number}, {layer}, clients {kind}", fontsize=9, loc="left")
    table = pd.concat({number: means(one) for number, one in found.items()}, names=["round", "layer"])
    return {"cka": figure}, table.reset_index()
