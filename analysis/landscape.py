"""Loss surfaces around the global models of runs, side by side on the same axes, and the diversity of their pools.

The same two random directions serve every model, each scaled filter by filter to the weights of that model (Li et al.,
NeurIPS 2018). Vectors (biases, normalisation) have no filters, so their part of the directions is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from fedcross.analysis.sharpness import epsilon_sharpness, largest_eigenvalue
from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream

if TYPE_CHECKING:
    from torch import nn

    from fedcross.analysis.subject import Options, Subject

POOL = {"pool_similarity_mean": "mean cosine similarity of two models", "pool_spread": "spread of the pool"}


class Point:
    """A model as a point in the space of its flat weights, with the loss on fixed examples.

    Parameters
    ----------
    net : Module
        In evaluation mode; its buffers do not change.
    x, y : Tensor
        Prepared inputs, and labels, of the examples.
    """

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.net = net
        named = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in named.items()}
        self.weights = torch.cat([p.reshape(-1) for p in named.values()])
        self._x, self._y = x, y

    def loss(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy with weights `flat`, shape (d,)."""
        scores: torch.Tensor = torch.func.functional_call(self.net, self._split(flat), (self._x,))
        return torch.nn.functional.cross_entropy(scores, self._y)

    def _split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def direction(self, seed: int, index: int) -> torch.Tensor:
        """Return direction `index` of `seed`, shape (d,); each filter has the norm of the model's filter."""
        drawn = stream(seed, "landscape", index).standard_normal(len(self.weights), dtype=np.float32)
        mine, random = self._split(self.weights), self._split(torch.from_numpy(drawn).to(self.weights))
        return torch.cat([filter_normalised(random[name], mine[name]).reshape(-1) for name in self.shapes])


def filter_normalised(direction: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `direction` with each filter (row of the first axis) scaled to the norm in `weights`; zero for vectors."""
    if weights.dim() < 2:
        return torch.zeros_like(direction)
    rows, mine = direction.flatten(1), weights.flatten(1)
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return (rows * mine.norm(dim=1, keepdim=True) / lengths).reshape(direction.shape)


def surface(
    loss: Callable[[torch.Tensor], torch.Tensor],
    point: torch.Tensor,
    d1: torch.Tensor,
    d2: torch.Tensor,
    axis: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the loss at ``point + axis[i] d1 + axis[j] d2``, shape (len(axis), len(axis))."""
    with torch.no_grad():
        return np.array([[float(loss(point + float(a) * d1 + float(b) * d2)) for b in axis] for a in axis])


def view(subject: Subject, axis: NDArray[np.float64], options: Options) -> dict[str, Any]:
    """Return the loss around a finished run's global model: its ``surface``, and the sharpness at its centre."""
    indices = subject.sample(options.examples)
    labels = torch.from_numpy(subject.task.test.y[indices].astype(np.int64))
    point = Point(subject.network(subject.final_model()), subject.inputs(indices), labels)
    d1, d2 = (point.direction(options.seed, index) for index in (0, 1))
    start = torch.from_numpy(stream(options.seed, "landscape", 2).standard_normal(len(point.weights), dtype=np.float32))
    with torch.no_grad():
        loss = float(point.loss(point.weights))
    return {
        "run": subject.name,
        "loss": loss,
        "largest_eigenvalue": largest_eigenvalue(point.loss, point.weights, start),
        "epsilon_sharpness": epsilon_sharpness(point.loss, point.weights),
        "surface": surface(point.loss, point.weights, d1, d2, axis),
    }


def draw(subjects: Sequence[Subject], options: Options, out: Path) -> list[Path]:
    """Write ``landscape.png``, ``landscape.csv`` (sharpness) and, if runs have pools, ``diversity.png``.

    Raises
    ------
    ConfigError
        If the runs differ in task or model, or the number of points is even.
    """
    if options.points < 3 or options.points % 2 == 0:
        raise ConfigError(f"--points {options.points}: an odd number from 3, so that the model itself is on the grid.")
    kinds = {(s.config.names["task"], s.config.names["model"]) for s in subjects}
    if len(kinds) > 1:
        raise ConfigError(f"{sorted(kinds)}: loss surfaces compare only on one task and model. Choose runs of one.")
    axis = np.linspace(-options.radius, options.radius, options.points)
    views = [view(subject, axis, options) for subject in subjects]
    _draw_views(views, axis, out / "landscape.png")
    pd.DataFrame(views).drop(columns="surface").to_csv(out / "landscape.csv", index=False)
    written = [out / "landscape.png", out / "landscape.csv"]
    return written + _draw_diversity([subject.folder for subject in subjects], out / "diversity.png")


def _draw_views(views: Sequence[dict[str, Any]], axis: NDArray[np.float64], path: Path) -> None:
    """Draw the surfaces side by side with one range, one logarithmic colour scale and the same contours."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    every = np.stack([one["surface"] for one in views])
    low = max(float(every.min()), 1e-6)
    high = max(float(every.max()), low * 1.01)
    levels = np.geomspace(low, high, 16)
    figure = Figure(figsize=(4.6 * len(views) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(views), sharex=True, sharey=True, squeeze=False)[0]
    for panel, one in zip(panels, views, strict=True):
        shown = np.clip(one["surface"].T, low, high)
        filled = panel.contourf(axis, axis, shown, levels=levels, norm=LogNorm(low, high), cmap="viridis")
        panel.contour(axis, axis, shown, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        panel.plot(0, 0, "+", color="white", markersize=10)
        numbers = (
            f"largest Hessian eigenvalue {one['largest_eigenvalue']:.3g}, ε-sharpness {one['epsilon_sharpness']:.3g} %"
        )
        panel.set_title(f"{one['run']}\n{numbers}", fontsize=9)
        panel.set(xlabel="direction 1 (filter-normalised)", aspect="equal")
    panels[0].set_ylabel("direction 2 (filter-normalised)")
    bar = figure.colorbar(filled, ax=list(panels), label="test loss")
    bar.set_ticks(levels[::3].tolist(), labels=[f"{level:.3g}" for level in levels[::3]])
    figure.savefig(path, dpi=130)


def _draw_diversity(folders: Sequence[Path], path: Path) -> list[Path]:
    """Draw mean pairwise similarity and spread of the pools over rounds; return the file, or none without a pool."""
    from matplotlib.figure import Figure

    from fedcross.analysis.frames import load_runs
    from fedcross.analysis.labels import curve, runs_frame

    frame, _ = runs_frame(load_runs(folders, unfinished=True)[0])
    pools = frame[[run.curve.get("pool_spread", pd.Series(dtype=float)).notna().any() for run in frame["run"]]]
    if pools.empty:
        return []
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for panel, (column, label) in zip(figure.subplots(1, 2), POOL.items(), strict=True):
        for _, group in pools.groupby("group", sort=False):
            points = curve(group, "rounds", column)
            (line,) = panel.plot(points["x"], points["mean"], label=group["method"].iloc[0])
            low, high = points["mean"] - points["std"], points["mean"] + points["std"]
            panel.fill_between(points["x"], low, high, color=line.get_color(), alpha=0.2)
        panel.set(xlabel="round", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return [path]
