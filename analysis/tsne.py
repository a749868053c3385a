"""t-SNE maps of embeddings of test examples: the global model at chosen rounds, single models before and after."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.analysis.subject import Arrays, Options, Subject

PERPLEXITY = 30.0


def embed(features: NDArray[np.floating], seed: int) -> NDArray[np.float64]:
    """Return the map (n, 2) of `features` (n, d): scikit-learn's t-SNE, initialised by PCA and deterministic."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return np.asarray(TSNE(init="pca", perplexity=perplexity, random_state=seed).fit_transform(features), np.float64)


def features(subject: Subject, arrays: Arrays, indices: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the embeddings (n, d) of test examples."""
    import torch

    with torch.no_grad():
        found: torch.Tensor = subject.network(arrays).get_submodule("features")(subject.inputs(indices))
    return found.numpy()


def neighbours(points: NDArray[np.floating], labels: NDArray[np.int64], count: int = 10) -> float:
    """Return the share of the `count` nearest neighbours that have a point's own label: how well classes separate."""
    from sklearn.neighbors import NearestNeighbors

    count = min(count, len(points) - 1)
    near = NearestNeighbors(n_neighbors=count + 1).fit(points).kneighbors(points, return_distance=False)[:, 1:]
    return float((labels[near] == labels[:, None]).mean())


def panels(subject: Subject, options: Options) -> list[list[tuple[str, Arrays]]]:
    """Return rows of (title, model): the global model over the rounds, then each chosen slot at each stage."""
    rounds = subject.rounds(options.rounds)
    rows = [[(f"global model, round {number}", subject.global_model(number)) for number in rounds]]
    rows += [
        [
            (f"model {slot}, round {number}, at client {one.clients[slot]}", one.models[slot])
            for one in subject.exchanges(number)
            if slot in one.models
        ]
        for slot in options.slots
        for number in rounds
    ]
    return [row for row in rows if row]


def draw(subject: Subject, options: Options, out: Path) -> list[Path]:
    """Write ``tsne.png`` and ``tsne.csv`` (coordinates) into `out`; return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = panels(subject, options)
    indices = subject.sample(options.examples)
    labels = subject.task.test.y[indices]
    width = max(map(len, rows))
    figure = Figure(figsize=(4.2 * width + 1.4, 4.2 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), width, squeeze=False)
    figure.suptitle(f"t-SNE of embeddings, {len(indices)} test examples: {subject.name}", x=0.01, ha="left")
    lines: list[tuple[Any, ...]] = [("panel", "example", "label", "x", "y")]
    handles: list[Any] = []
    for row, axes_row in zip(rows, grid):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for (title, arrays), axes in zip(row, axes_row):
            found = features(subject, arrays, indices)
            points = embed(found, subject.seed)
            handles = _scatter(
                axes, points, labels, f"{title}\nneighbours of the same class {neighbours(found, labels):.0%}"
            )
            lines += [(title, int(i), int(y), *map(float, p)) for i, y, p in zip(indices, labels, points)]
    names = [subject.label(label) for label in sorted(set(labels.tolist()))]
    figure.legend(handles, names, loc="outside right upper", fontsize=9, frameon=False, markerscale=2)
    picture, table = out / "tsne.png", out / "tsne.csv"
    figure.savefig(picture)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return [picture, table]


def _scatter(axes: Any, points: NDArray[np.float64], labels: NDArray[np.int64], title: str) -> list[Any]:
    from matplotlib import colormaps

    colours = colormaps["tab10" if labels.max() < 10 else "tab20"].colors  # type: ignore[attr-defined]
    handles = [
        axes.scatter(*points[labels == label].T, s=9, color=colours[label % len(colours)], linewidths=0)
        for label in sorted(set(labels.tolist()))
    ]
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    return handles
