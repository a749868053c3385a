"""Grad-CAM: which part of a test image supports its class, for the global model and single models.

Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization, ICCV 2017. The
library pytorch-grad-cam computes the maps at the network's last convolution.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcross.analysis.subject import Arrays, Options, Subject
from fedcross.core.errors import ConfigError, DataError

#: Default number of images: the first test image of each of this many classes.
CLASSES = 6


def maps(subject: Subject, arrays: Arrays, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32], list[int]]:
    """Return heat maps in [0, 1], (n, height, width), for the true classes of test images, and the predicted classes.

    Raises
    ------
    DataError
        If the network has no convolution.
    ConfigError
        If the library is not installed.
    """
    import torch
    from torch import nn

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
    with torch.no_grad():
        guesses = [int(guess) for guess in model(inputs).argmax(1)]
    targets = [ClassifierOutputTarget(int(subject.task.test.y[i])) for i in indices]
    with GradCAM(model=model, target_layers=[convolutions[-1]]) as cam:
        return np.asarray(cam(input_tensor=inputs, targets=targets), dtype=np.float32), guesses


def pictures(subject: Subject, indices: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return test images as colours in [0, 1], (n, height, width, 3)."""
    if len(subject.task.shape) != 3:
        raise DataError(f"{subject.folder}: its task has inputs of shape {subject.task.shape}, no images.")
    raw = np.asarray(subject.task.test.x[indices], dtype=np.float32)
    low, high = float(raw.min()), float(raw.max())
    shown = ((raw - low) / max(high - low, 1e-9)).transpose(0, 2, 3, 1)
    return np.repeat(shown, 3, axis=3) if shown.shape[3] == 1 else shown[..., :3]


def columns(subject: Subject, options: Options) -> list[tuple[str, Arrays]]:
    """Return (title, model): the global model over the rounds, then chosen slots in the last round, at each client."""
    rounds = subject.rounds(options.rounds)
    found = [(f"global,\nround {number}", subject.global_model(number)) for number in rounds]
    exchanges = subject.exchanges(rounds[-1])
    slots = options.slots or ((min(exchanges[0].models),) if exchanges else ())
    for slot in slots:
        found += [
            (f"model {slot}, round {one.round},\nat client {one.clients[slot]}", one.models[slot])
            for one in exchanges
            if slot in one.models
        ]
    return found


def draw(subject: Subject, options: Options, out: Path) -> list[Path]:
    """Write ``gradcam.png`` into `out`; return its path."""
    from matplotlib.figure import Figure

    indices = _chosen(subject, options)
    shown = pictures(subject, indices)
    models = columns(subject, options)
    figure = Figure(figsize=(1.7 * (len(models) + 1), 1.95 * len(indices) + 0.7), dpi=130, layout="constrained")
    grid = figure.subplots(len(indices), len(models) + 1, squeeze=False)
    figure.suptitle(f"Grad-CAM for the true class: {subject.name}", x=0.01, ha="left", fontsize=10)
    for row, (axes, index) in enumerate(zip(grid[:, 0], indices)):
        axes.imshow(shown[row])
        axes.set_title(f"{subject.label(int(subject.task.test.y[index]))} ({index})", fontsize=8)
    for column, (title, arrays) in enumerate(models, start=1):
        heat, guesses = maps(subject, arrays, indices)
        for row, axes in enumerate(grid[:, column]):
            axes.imshow(shown[row])
            axes.imshow(heat[row], cmap="jet", alpha=0.45, vmin=0, vmax=1)
            head = f"{title}\n" if row == 0 else ""
            axes.set_title(f"{head}says {subject.label(guesses[row])}", fontsize=8)
    for axes in grid.ravel():
        axes.set_axis_off()
    picture = out / "gradcam.png"
    figure.savefig(picture)
    return [picture]


def _chosen(subject: Subject, options: Options) -> NDArray[np.int64]:
    y = subject.task.test.y
    if wrong := [index for index in options.images if not 0 <= index < len(y)]:
        raise DataError(f"--images {wrong}: the test set has images 0 to {len(y) - 1}.")
    if options.images:
        return np.array(options.images, dtype=np.int64)
    first = [np.flatnonzero(y == label)[:1] for label in range(min(CLASSES, subject.task.classes))]
    return np.concatenate(first).astype(np.int64)
