"""Loss surfaces around the global models of runs, side by side on the same axes, and the diversity of their pools.

The same two random directions serve every model, each scaled filter by filter to the weights of that model (Li et al.,
NeurIPS 2018). Vectors (biases, normalisation) have no filters, so their part of the directions is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.autograd.functional import vhp

from fedcross.analysis.records import load_runs
from fedcross.analysis.runs import curve, runs_frame
from fedcross.analysis.subject import Options, Subject
from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream

Loss = Callable[[Tensor], Tensor]
"""A loss as a function of one flat vector."""

POOL = {"pool_similarity_mean": "mean cosine similarity of two models", "pool_spread": "spread of the pool"}


class Point:
    """The trained weights of `net`, flat (d,), with the loss on fixed examples: prepared inputs `x`, labels `y`."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        self.net, self._x, self._y = net, x, y
        named = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in named.items()}
        self.weights = torch.cat([p.reshape(-1) for p in named.values()])

    def loss(self, flat: Tensor) -> Tensor:
        """Return the mean cross-entropy with weights `flat`, shape (d,)."""
        scores: Tensor = torch.func.functional_call(self.net, self._split(flat), (self._x,))
        return torch.nn.functional.cross_entropy(scores, self._y)

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def drawn(self, seed: int, index: int) -> Tensor:
        """Return the standard normal vector `index` of `seed`, shape (d,)."""
        numbers = stream(seed, "landscape", index).standard_normal(len(self.weights), dtype=np.float32)
        return torch.from_numpy(numbers).to(self.weights)

    def direction(self, seed: int, index: int) -> Tensor:
        """Return direction `index` of `seed`, shape (d,); each filter has the norm of the model's filter."""
        mine, random = self._split(self.weights), self._split(self.drawn(seed, index))
        return torch.cat([filter_normalised(random[name], mine[name]).reshape(-1) for name in self.shapes])


def filter_normalised(direction: Tensor, weights: Tensor) -> Tensor:
    """Return `direction` with each filter (row of the first axis) scaled to the norm in `weights`; zero for vectors."""
    if weights.dim() < 2:
        return torch.zeros_like(direction)
    rows, mine = direction.flatten(1), weights.flatten(1)
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return (rows * mine.norm(dim=1, keepdim=True) / lengths).reshape(direction.shape)


def surface(loss: Loss, point: Tensor, d1: Tensor, d2: Tensor, axis: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the loss at ``point + axis[i] d1 + axis[j] d2``, shape (len(axis), len(axis))."""
    with torch.no_grad():
        return np.array([[float(loss(point + float(a) * d1 + float(b) * d2)) for b in axis] for a in axis])


def largest_eigenvalue(loss: Loss, point: Tensor, start: Tensor, tolerance: float = 1e-3) -> float:
    """Return the largest (most positive) eigenvalue of the Hessian of `loss` at `point`, to relative `tolerance`.

    `start`, shape (d,), is the initial vector of Lanczos's method (scipy's ``eigsh``).
    """

    def times(vector: object) -> object:  # the product with the Hessian
        return vhp(loss, point, torch.as_tensor(vector).to(point))[1].numpy()  # type: ignore[no-untyped-call]

    operator = LinearOperator((len(point), len(point)), matvec=times, dtype=start.numpy().dtype)
    values = eigsh(operator, k=1, which="LA", v0=start.numpy(), tol=tolerance, return_eigenvectors=False)
    return float(values[0])


def epsilon_sharpness(loss: Loss, point: Tensor, epsilon: float = 1e-3, steps: int = 10) -> float:
    """Return 100 (max L - L(w)) / (1 + L(w)), the maximum over the box |w'_i - w_i| <= epsilon (|w_i| + 1), in percent.

    The definition is Keskar et al.'s (2017). `steps` steps along the sign of the gradient, each half the width of the
    box and clipped to it, approximate the maximum: exact for a linear loss, otherwise a lower bound.
    """
    reach = epsilon * (point.abs() + 1)
    with torch.no_grad():
        here = highest = float(loss(point))
    at = point.detach().clone()
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss(at.requires_grad_()), at)
        at = (at.detach() + reach / 2 * gradient.sign()).clamp(point - reach, point + reach)
        with torch.no_grad():
            highest = max(highest, float(loss(at)))
    return 100 * (highest - here) / (1 + here)


def view(subject: Subject, axis: NDArray[np.float64], options: Options) -> dict[str, Any]:
    """Return the loss around a finished run's global model: its ``surface``, and the sharpness at its centre."""
    indices = subject.sample(options.examples)
    labels = torch.from_numpy(subject.task.test.y[indices].astype(np.int64))
    point = Point(subject.network(subject.global_model()), subject.inputs(indices), labels)
    d1, d2 = (point.direction(options.seed, index) for index in (0, 1))
    with torch.no_grad():
        loss = float(point.loss(point.weights))
    return {
        "run": subject.name,
        "loss": loss,
        "largest_eigenvalue": largest_eigenvalue(point.loss, point.weights, point.drawn(options.seed, 2)),
        "epsilon_sharpness": epsilon_sharpness(point.loss, point.weights),
        "surface": surface(point.loss, point.weights, d1, d2, axis),
    }


def draw(subjects: Sequence[Subject], options: Options) -> tuple[dict[str, Figure], pd.DataFrame]:
    """Return the surfaces, the diversity if runs have pools, and a table of sharpness.

    A ConfigError says that the runs differ in task or model, or that the number of points is even.
    """
    if options.points < 3 or options.points % 2 == 0:
        raise ConfigError(f"--points {options.points}: an odd number from 3, so that the model itself is on the grid.")
    kinds = {(s.config.names["task"], s.config.names["model"]) for s in subjects}
    if len(kinds) > 1:
        raise ConfigError(f"{sorted(kinds)}: loss surfaces compare only on one task and model. Choose runs of one.")
    axis = np.linspace(-options.radius, options.radius, options.points)
    views = [view(subject, axis, options) for subject in subjects]
    figures = {"landscape": _draw_views(views, axis), **_draw_diversity(subjects)}
    return figures, pd.DataFrame(views).drop(columns="surface")


def _draw_views(views: Sequence[dict[str, Any]], axis: NDArray[np.float64]) -> Figure:
    """Draw the surfaces side by side with one range, one logarithmic colour scale and the same contours."""
    low = max(min(float(one["surface"].min()) for one in views), 1e-6)
    high = max(*(float(one["surface"].max()) for one in views), low * 1.01)
    levels = np.geomspace(low, high, 16)
    figure = Figure(figsize=(4.6 * len(views) + 1, 4.6), layout="constrained")
    panels = figure.subplots(1, len(views), sharex=True, sharey=True, squeeze=False)[0]
    for panel, one in zip(panels, views, strict=True):
        shown = np.clip(one["surface"].T, low, high)
        filled = panel.contourf(axis, axis, shown, levels=levels, norm=LogNorm(low, high), cmap="viridis")
        panel.contour(axis, axis, shown, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        panel.plot(0, 0, "+", color="white", markersize=10)
        sharpness = f"ε-sharpness {one['epsilon_sharpness']:.3g} %"
        numbers = f"largest Hessian eigenvalue {one['largest_eigenvalue']:.3g}, {sharpness}"
        panel.set_title(f"{one['run']}\n{numbers}", fontsize=9)
        panel.set(xlabel="direction 1 (filter-normalised)", aspect="equal")
    panels[0].set_ylabel("direction 2 (filter-normalised)")
    bar = figure.colorbar(filled, ax=list(panels), label="test loss")
    bar.set_ticks(levels[::3].tolist(), labels=[f"{level:.3g}" for level in levels[::3]])
    return figure


def _draw_diversity(subjects: Sequence[Subject]) -> dict[str, Figure]:
    """Return the figure of mean pairwise similarity and spread of the pools over rounds; nothing without a pool."""
    frame, _ = runs_frame(load_runs([subject.folder for subject in subjects], unfinished=True)[0])
    pools = frame[[run.column("pool_spread").notna().any() for run in frame["run"]]]
    if pools.empty:
        return {}
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
    return {"diversity": figure}
