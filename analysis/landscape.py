"""``fedcross landscape``: loss surfaces around the global models of runs, side by side on the same axes.

The same two random directions are used for every model, each scaled filter by filter to the weights of that model (Li
et al., NeurIPS 2018); all plots share one range and one colour scale. Vectors (biases, normalisation) have no filters,
so their part of the directions is zero. The package ``loss-landscapes`` is not used: in each call, it draws new
non-negative uniform directions from torch's global generator, so two models never share axes and no seed controls the
directions. It also changes normalisation weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.core.overrides import shown
from fedcross.core.randomness import stream
from fedcross.core.strict_json import dumps

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedcross.analysis.subject import Subject

Surface = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """The loss around one model.

    Attributes
    ----------
    name : str
        Short description of the run.
    surface : array of float, shape (points, points)
        Loss at ``w + axis[i] * d1 + axis[j] * d2``.
    sharpness : mapping of str to float
        ``loss``, ``largest_eigenvalue``, ``epsilon_sharpness``.
    """

    name: str
    surface: Surface
    sharpness: Mapping[str, float]


class Point:
    """A model as a point in the space of its flat weights, with the loss on fixed examples.

    Parameters
    ----------
    net : Module
        Must be in evaluation mode; its buffers do not change.
    x, y : Tensor
        Prepared inputs, and labels, of the examples.
    """

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.net = net
        self.shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if p.requires_grad}
        parts = [p.detach().reshape(-1) for p in net.parameters() if p.requires_grad]
        import torch

        self.weights = torch.cat(parts)
        self._x, self._y = x, y

    def loss(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy with weights `flat`, shape (d,)."""
        from torch.func import functional_call
        from torch.nn.functional import cross_entropy

        scores: torch.Tensor = functional_call(self.net, self._split(flat), (self._x,))
        return cross_entropy(scores, self._y)

    def _split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        return {n: part.reshape(shape) for (n, shape), part in zip(self.shapes.items(), torch.split(flat, sizes))}

    def direction(self, seed: int, index: int) -> torch.Tensor:
        """Return direction `index` of `seed`, shape (d,); each filter has the norm of the model's filter."""
        import torch

        drawn = stream(seed, "landscape", index).standard_normal(len(self.weights), dtype=np.float32)
        mine, random = self._split(self.weights), self._split(torch.from_numpy(drawn).to(self.weights))
        return torch.cat([filter_normalised(random[name], mine[name]).reshape(-1) for name in self.shapes])


def filter_normalised(direction: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `direction` with each filter (row of the first axis) scaled to the norm in `weights`; zero for vectors."""
    import torch

    if weights.dim() < 2:
        return torch.zeros_like(direction)
    rows, mine = direction.flatten(1), weights.flatten(1)
    lengths = rows.norm(dim=1, keepdim=True)
    scaled = rows * mine.norm(dim=1, keepdim=True) / lengths.clamp_min(torch.finfo(rows.dtype).tiny)
    shaped: torch.Tensor = scaled.reshape(direction.shape)
    return shaped


def surface(
    loss: Callable[[torch.Tensor], torch.Tensor],
    point: torch.Tensor,
    d1: torch.Tensor,
    d2: torch.Tensor,
    axis: NDArray[np.float64],
) -> Surface:
    """Return the loss at ``point + axis[i] d1 + axis[j] d2``, shape (len(axis), len(axis))."""
    import torch

    with torch.no_grad():
        rows = [[float(loss(point + float(a) * d1 + float(b) * d2)) for b in axis] for a in axis]
    return np.array(rows)


def view(subject: Subject, axis: NDArray[np.float64], examples: int, seed: int) -> View:
    """Return the loss around a finished run's global model on `examples` test examples."""
    import torch

    from fedcross.analysis.sharpness import epsilon_sharpness, largest_eigenvalue

    point = final_point(subject, examples)
    d1, d2 = (point.direction(seed, index) for index in (0, 1))
    start = torch.from_numpy(stream(seed, "landscape", 2).standard_normal(len(point.weights), dtype=np.float32))
    grid = surface(point.loss, point.weights, d1, d2, axis)
    with torch.no_grad():
        loss = float(point.loss(point.weights))
    sharpness = {
        "loss": loss,
        "largest_eigenvalue": largest_eigenvalue(point.loss, point.weights, start)[0],
        "epsilon_sharpness": epsilon_sharpness(point.loss, point.weights),
    }
    return View(subject.name, grid, sharpness)


def final_point(subject: Subject, examples: int) -> Point:
    """Return the final global model of a run, with test examples in equal numbers per class.

    Raises
    ------
    DataError
        If the run has not finished.
    """
    import torch
    from safetensors.numpy import load_file

    path = subject.folder / "model.safetensors"
    if not path.exists():
        raise DataError(
            f"{subject.folder}: no model.safetensors. Let the run finish: fedcross resume={shown(subject.folder)}"
        )
    net = subject.network(dict(load_file(path)))
    indices = subject.sample(examples)
    return Point(net, subject.inputs(indices), torch.from_numpy(subject.task.test.y[indices].astype(np.int64)))


def draw_views(views: Sequence[View], axis: NDArray[np.float64], path: Path) -> None:
    """Draw the surfaces side by side with one range, one logarithmic colour scale and the same contours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    low = max(min(float(v.surface.min()) for v in views), 1e-6)
    high = max(max(float(v.surface.max()) for v in views), low * 1.01)
    levels = np.geomspace(low, high, 16)
    figure = Figure(figsize=(4.6 * len(views) + 1, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(views), sharex=True, sharey=True))
    for panel, one in zip(panels, views):
        shown = np.clip(one.surface.T, low, high)
        filled = panel.contourf(axis, axis, shown, levels=levels, norm=LogNorm(low, high), cmap="viridis")
        panel.contour(axis, axis, shown, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        panel.plot(0, 0, "+", color="white", markersize=10)
        numbers = one.sharpness
        panel.set_title(
            f"{one.name}\nlargest Hessian eigenvalue {numbers['largest_eigenvalue']:.3g}, "
            f"ε-sharpness {numbers['epsilon_sharpness']:.3g} %",
            fontsize=9,
        )
        panel.set_xlabel("direction 1 (filter-normalised)")
        panel.set_aspect("equal")
    panels[0].set_ylabel("direction 2 (filter-normalised)")
    bar = figure.colorbar(filled, ax=list(panels), label="test loss")
    bar.set_ticks([float(level) for level in levels[::3]], labels=[f"{level:.3g}" for level in levels[::3]])
    figure.savefig(path, dpi=130)


def draw_diversity(folders: Sequence[Path], path: Path) -> bool:
    """Draw mean pairwise similarity and spread of the pools over rounds; return whether any run has a pool."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fedcross.analysis.groups import group_runs
    from fedcross.analysis.loading import load_runs

    groups, _ = group_runs(load_runs(folders, unfinished=True).runs)
    columns = {"pool_similarity_mean": "mean cosine similarity of two models", "pool_spread": "spread of the pool"}
    pools = [g for g in groups if all(np.isfinite(run.column("pool_similarity_mean")).any() for run in g.runs)]
    if not pools:
        return False
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (column, label) in zip(figure.subplots(1, 2), columns.items()):
        for group in pools:
            x, mean, std = group.curve("rounds", column)
            (line,) = panel.plot(x, mean, label=group.label)
            panel.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.2)
        panel.set_xlabel("round")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return True


def landscape(
    runs: Sequence[Path],
    out: Path,
    data: Path | None = None,
    radius: float = 1.0,
    points: int = 21,
    examples: int = 500,
    seed: int = 1,
) -> list[Path]:
    """Write ``landscape.png``, ``landscape.json`` and, if runs have pools, ``diversity.png``; return the files.

    Parameters
    ----------
    runs : sequence of Path
        Folders of finished runs of one task and model.
    out : Path
        Folder for the files.
    data : Path or None
        Folder of the data sets; that of the runs if None.
    radius, points : float, int
        The axes go from -radius to radius (1: the norm of the filters) in `points` points, an odd number.
    examples : int
        Number of test examples over which the loss is averaged.
    seed : int
        Seed of the directions.

    Raises
    ------
    ConfigError
        If the runs differ in task or model, or `points` is even.
    DataError
        If a run has not finished, or its data set is missing.
    StorageError
        If `out` cannot be written.
    """
    from fedcross.analysis.subject import Subject

    if points < 3 or points % 2 == 0:
        raise ConfigError(f"--points {points}: an odd number from 3, so that the model itself is on the grid.")
    subjects = [Subject(run, data) for run in runs]
    kinds = {(s.config["task"]["name"], s.config["model"]["name"]) for s in subjects}
    if len(kinds) > 1:
        raise ConfigError(f"{sorted(kinds)}: loss surfaces compare only on one task and model. Choose runs of one.")
    axis = np.linspace(-radius, radius, points)
    views = [view(subject, axis, examples, seed) for subject in subjects]
    try:
        out.mkdir(parents=True, exist_ok=True)
        draw_views(views, axis, out / "landscape.png")
        found: list[dict[str, Any]] = [{"run": v.name, **v.sharpness, "surface": v.surface.tolist()} for v in views]
        text = dumps({"axis": axis.tolist(), "examples": examples, "seed": seed, "runs": found}, indent=1)
        (out / "landscape.json").write_text(text + "\n", encoding="utf-8")
        pool = draw_diversity(runs, out / "diversity.png")
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error}). Choose another folder with --out.") from error
    return [out / name for name in ("landscape.png", "landscape.json", *(["diversity.png"] if pool else []))]
