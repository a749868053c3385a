"""t-SNE maps of embeddings of test examples: the global model at chosen rounds, single models before and after."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

from fedcross.analysis.subject import Options, Subject
from fedcross.tasks.scoring import predictions


def embed(features: NDArray[np.floating], seed: int) -> NDArray[np.float64]:
    """Return the map (n, 2) of `features` (n, d): scikit-learn's t-SNE, initialised by PCA and deterministic."""
    perplexity = min(30.0, (len(features) - 1) / 3)
    return np.asarray(TSNE(init="pca", perplexity=perplexity, random_state=seed).fit_transform(features), np.float64)


def neighbours(points: NDArray[np.floating], labels: NDArray[np.int64], count: int = 10) -> float:
    """Return the share of the `count` nearest neighbours that have a point's own label: how well classes separate."""
    near = (
        NearestNeighbors(n_neighbors=min(count + 1, len(points)))
        .fit(points)
        .kneighbors(points, return_distance=False)[:, 1:]
    )
    return float((labels[near] == labels[:, None]).mean())


def draw(subject: Subject, options: Options) -> tuple[dict[str, Figure], pd.DataFrame]:
    """Return maps of the global model over the rounds, then of each chosen slot at each stage, and the coordinates."""
    rounds, indices = subject.rounds(options.rounds), subject.sample(options.examples)
    rows = [[(f"global model, round {number}", subject.global_model(number)) for number in rounds]]
    rows += [visits for slot in options.slots for number in rounds if (visits := subject.visits(number, [slot]))]
    labels = subject.task.test.y[indices]
    names = [subject.label(int(label)) for label in labels]
    title, columns = f"t-SNE of embeddings, {len(indices)} test examples", max(map(len, rows))
    figure, grid = subject.panels(title, len(rows), columns, (4.6 * columns, 4.2 * len(rows)))
    parts = []
    for axes in grid.ravel():
        axes.set_axis_off()
    for row, axes_row in zip(rows, grid, strict=True):
        for (title, arrays), axes in zip(row, axes_row, strict=False):
            embedding = subject.network(arrays).get_submodule("features")
            found = predictions(embedding, subject.inputs(indices)).numpy()
            x, y = embed(found, subject.seed).T
            part = pd.DataFrame({"panel": title, "example": indices, "label": names, "x": x, "y": y})
            seaborn.scatterplot(part, x="x", y="y", hue="label", hue_order=sorted(set(names)), s=12, ax=axes)
            share = neighbours(found, labels)
            axes.set_title(f"{title}\nneighbours of the same class {share:.0%}", fontsize=9, loc="left")
            parts.append(part)
    return {"tsne": figure}, pd.concat(parts)
