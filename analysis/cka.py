"""Linear centred kernel alignment of layers: one model before and after an exchange, and models of different clients.

Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019: CKA is 1 if two representations
agree up to rotation and scale, and near 0 if they are unrelated.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcross.analysis.subject import Options, RecordedExchange, Subject

if TYPE_CHECKING:
    import torch
    from torch import nn

Gram = NDArray[np.float64]


def gram(x: NDArray[np.generic]) -> Gram:
    """Return the centred Gram matrix (n, n) of representations `x`, (n, ...), scaled to Frobenius norm 1.

    A constant representation gives zeros.
    """
    rows = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
    rows = rows - rows.mean(axis=0)
    product = rows @ rows.T
    norm = np.linalg.norm(product)
    return np.asarray(product / norm if norm > 0 else product)


def linear_cka(one: Gram, other: Gram) -> float:
    """Return the linear CKA in [0, 1] of two representations of the same n examples, from their :func:`gram`."""
    return float(np.sum(one * other))


def layers(model: nn.Module, inputs: torch.Tensor) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of all convolutions, linear and recurrent layers, (n, ...) by name, in forward order."""
    import torch
    from torch import nn

    found: dict[str, NDArray[np.float32]] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            found[name] = value.detach().numpy()

        return hook

    kinds = (nn.Conv2d, nn.Linear, nn.RNNBase)
    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


@dataclass(frozen=True)
class Similarity:
    """CKA per layer in one round.

    Attributes
    ----------
    round : int
        The round.
    layers : list of str
        Names, in forward order.
    same : array (models, layers)
        Each model before compared with itself after the exchange; no rows if the round has only one exchange.
    before, after : array (layers, models, models)
        Models of different clients; `after` is None if the round has only one exchange.
    """

    round: int
    layers: list[str]
    same: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64] | None

    def rows(self) -> list[tuple[int, str, str, float]]:
        """Return (round, layer, comparison, mean CKA)."""
        found = []
        for i, layer in enumerate(self.layers):
            found.append((self.round, layer, "clients before", between(self.before[i])))
            if self.after is not None:
                found.append((self.round, layer, "clients after", between(self.after[i])))
                found.append((self.round, layer, "same model", float(self.same[:, i].mean())))
        return found


def between(matrix: NDArray[np.float64]) -> float:
    """Return the mean over pairs of different models; nan for fewer than two."""
    upper = matrix[np.triu_indices(len(matrix), 1)]
    return float(upper.mean()) if upper.size else float("nan")


def compare(subject: Subject, number: int, examples: int) -> Similarity:
    """Return the CKA values of round `number` on `examples` test examples."""
    exchanges = subject.exchanges(number)
    inputs = subject.inputs(subject.sample(examples))
    first, last = exchanges[0], exchanges[-1]
    slots = [slot for slot in first.models if slot in last.models]
    before = _grams(subject, first, slots, inputs)
    names = list(before[0])
    if len(exchanges) == 1:
        return Similarity(number, names, np.empty((0, len(names))), _pairs(before, names), None)
    after = _grams(subject, last, slots, inputs)
    same = [[float(np.sum(a[name] * b[name])) for name in names] for a, b in zip(before, after)]
    return Similarity(number, names, np.array(same), _pairs(before, names), _pairs(after, names))


def draw(subject: Subject, options: Options, out: Path) -> list[Path]:
    """Write ``cka.png`` and ``cka.csv`` into `out`; return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [compare(subject, number, options.examples) for number in subject.rounds(options.rounds)]
    figure = Figure(figsize=(13.5, 3.9 * len(found)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(found), 3, squeeze=False, gridspec_kw={"width_ratios": [1.7, 1, 1]})
    figure.suptitle(f"Linear CKA: {subject.name}", x=0.01, ha="left")
    for row, one in zip(grid, found):
        _lines(row[0], one)
        for axes, when, matrices in ((row[1], "before", one.before), (row[2], "after", one.after)):
            _matrix(
                figure, axes, matrices, f"round {one.round}, {one.layers[-2 if len(one.layers) > 1 else -1]}, {when}"
            )
    picture, table = out / "cka.png", out / "cka.csv"
    figure.savefig(picture)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("round", "layer", "comparison", "cka"), *(r for one in found for r in one.rows())])
    return [picture, table]


def _grams(
    subject: Subject, exchange: RecordedExchange, slots: list[int], inputs: torch.Tensor
) -> list[dict[str, Gram]]:
    models = (subject.network(exchange.models[slot]) for slot in slots)
    return [{name: gram(x) for name, x in layers(model, inputs).items()} for model in models]


def _pairs(grams: list[dict[str, Gram]], names: list[str]) -> NDArray[np.float64]:
    matrices = np.ones((len(names), len(grams), len(grams)))
    for i, name in enumerate(names):
        for a, b in combinations(range(len(grams)), 2):
            matrices[i, a, b] = matrices[i, b, a] = linear_cka(grams[a][name], grams[b][name])
    return matrices


def _lines(axes: Any, one: Similarity) -> None:
    at = np.arange(len(one.layers))
    if one.after is not None:
        for values in one.same:
            axes.plot(at, values, "o", color="#0072b2", alpha=0.25, markersize=4, markeredgewidth=0)
        axes.plot(at, one.same.mean(axis=0), "o-", color="#0072b2", label="same model, before and after the exchange")
        after = [between(matrix) for matrix in one.after]
        axes.plot(at, after, "s--", color="#d55e00", label="models of two clients, after")
    axes.plot(at, [between(m) for m in one.before], "^:", color="#555555", label="models of two clients, before")
    axes.set_xticks(at, [name.removeprefix("features.") for name in one.layers], rotation=30, ha="right", fontsize=8)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("CKA")
    axes.set_title(f"round {one.round}", loc="left", fontsize=10)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _matrix(figure: Any, axes: Any, matrices: NDArray[np.float64] | None, title: str) -> None:
    if matrices is None:
        axes.set_axis_off()
        return
    layer = -2 if len(matrices) > 1 else -1  # the embedding: the layer before the classifier
    image = axes.imshow(matrices[layer], vmin=0, vmax=1, cmap="viridis")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("model of slot")
    figure.colorbar(image, ax=axes, shrink=0.8)
