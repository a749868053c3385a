"""Grad-CAM: which part of a test image supports its class, for the global model and single models.

Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization, ICCV 2017. The
library pytorch-grad-cam computes the maps at the network's last convolution.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import nn

from fedcross.analysis.subject import Arrays, Options, Subject
from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks.scoring import predictions

#: Default number of images: the first test image of each of this many classes.
CLASSES = 6


def maps(subject: Subject, arrays: Arrays, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32], list[int]]:
    """Return heat maps in [0, 1], (n, height, width), for the true classes of test images, and the predicted classes.

    A DataError says that the network has no convolution, a ConfigError that the library is not installed.
    """
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError as error:
        raise ConfigError("gradcam needs pytorch-grad-cam. In the checkout: pip install -e '.[analysis]'") from error
    model = subject.network(arrays)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise DataError(f"{subject.folder}: its model has no convolution. Grad-CAM needs one; choose another run.")
    inputs = subject.inputs(indices)
    guesses: list[int] = predictions(model, inputs).argmax(1).tolist()
    targets = [ClassifierOutputTarget(int(subject.task.test.y[i])) for i in indices]
    with GradCAM(model=model, target_layers=[convolutions[-1]]) as cam:
        return np.asarray(cam(input_tensor=inputs, targets=targets), dtype=np.float32), guesses


def pictures(subject: Subject, indices: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return test images as colours in [0, 1], (n, height, width, 3)."""
    if len(subject.task.shape) != 3:
        raise DataError(f"{subject.folder}: its task has inputs of shape {subject.task.shape}, no images.")
    raw = np.asarray(subject.task.test.x[indices], dtype=np.float32)
    shown = ((raw - raw.min()) / max(float(np.ptp(raw)), 1e-9)).transpose(0, 2, 3, 1)
    return np.repeat(shown, 3, axis=3) if shown.shape[3] == 1 else shown[..., :3]


def draw(subject: Subject, options: Options) -> tuple[dict[str, Figure], None]:
    """Return a row for each image: the global model over the rounds, then chosen slots of the last at each client."""
    indices, rounds = _chosen(subject, options), subject.rounds(options.rounds)
    models = [(f"global,\nround {number}", subject.global_model(number)) for number in rounds]
    if exchanges := subject.exchanges(rounds[-1]):
        visits = subject.visits(rounds[-1], options.slots or [min(exchanges[0].models)])
        models += [(title.replace(", at", ",\nat"), arrays) for title, arrays in visits]
    shown = pictures(subject, indices)
    size = 1.7 * (len(models) + 1), 1.95 * len(indices) + 0.7
    figure, grid = subject.panels("Grad-CAM for the true class", len(indices), len(models) + 1, size, fontsize=10)
    for row, picture, index in zip(grid, shown, indices, strict=True):
        for axes in row:
            axes.imshow(picture)
            axes.set_axis_off()
        row[0].set_title(f"{subject.label(int(subject.task.test.y[index]))} ({index})", fontsize=8)
    for column, (title, arrays) in enumerate(models, start=1):
        heat, guesses = maps(subject, arrays, indices)
        for axes, one, guess in zip(grid[:, column], heat, guesses, strict=True):
            axes.imshow(one, cmap="jet", alpha=0.45, vmin=0, vmax=1)
            head = f"{title}\n" if axes is grid[0, column] else ""
            axes.set_title(f"{head}says {subject.label(guess)}", fontsize=8)
    return {"gradcam": figure}, None


def _chosen(subject: Subject, options: Options) -> NDArray[np.int64]:
    y = subject.task.test.y
    if wrong := [index for index in options.images if not 0 <= index < len(y)]:
        raise DataError(f"--images {wrong}: the test set has images 0 to {len(y) - 1}.")
    if options.images:
        return np.array(options.images, dtype=np.int64)
    first = [np.flatnonzero(y == label)[:1] for label in range(min(CLASSES, subject.task.classes))]
    return np.concatenate(first).astype(np.int64)
