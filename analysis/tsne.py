"""t-SNE maps of embeddings of test examples: the global model at chosen rounds, single models before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedcross.analysis.subject import Arrays, Options, Subject


def embed(features: NDArray[np.floating], seed: int) -> NDArray[np.float64]:
    """Return the map (n, 2) of `features` (n, d): scikit-learn's t-SNE, initialised by PCA and deterministic."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
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
    import seaborn
    from matplotlib.figure import Figure

    rows = panels(subject, options)
    indices = subject.sample(options.examples)
    labels = subject.task.test.y[indices]
    names = [subject.label(int(label)) for label in labels]
    figure = Figure(figsize=(4.6 * max(map(len, rows)), 4.2 * len(rows)), dpi=120, layout="constrained")
    grid = figure.subplots(len(rows), max(map(len, rows)), squeeze=False)
    figure.suptitle(f"t-SNE of embeddings, {len(indices)} test examples: {subject.name}", x=0.01, ha="left")
    parts = []
    for axes in grid.ravel():
        axes.set_axis_off()
    for row, axes_row in zip(rows, grid, strict=True):
        for (title, arrays), axes in zip(row, axes_row, strict=False):
            found = features(subject, arrays, indices)
            x, y = embed(found, subject.seed).T
            part = pd.DataFrame({"panel": title, "example": indices, "label": names, "x": x, "y": y})
            seaborn.scatterplot(part, x="x", y="y", hue="label", hue_order=sorted(set(names)), s=12, ax=axes)
            share = neighbours(found, labels)
            axes.set_title(f"{title}\nneighbours of the same class {share:.0%}", fontsize=9, loc="left")
            parts.append(part)
    figure.savefig(out / "tsne.png")
    pd.concat(parts).to_csv(out / "tsne.csv", index=False)
    return [out / "tsne.png", out / "tsne.csv"]
