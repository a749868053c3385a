"""Your own pictures: one folder per class, for example on an edge device.

Layout: ``root/train/CLASS/*`` and ``root/test/CLASS/*``, or only ``root/CLASS/*``, of which `test_fraction` is held
out; ``root/test`` alone is for a machine that only evaluates. Labels are the positions in `classes`, else in the sorted
folder names: give `classes` where a device may lack a class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError, nearest
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.params import PARTS, ImageParams, OwnParams, finished, stratified
from fedcross.tasks.reading.pictures import Listing, pictures

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Params(OwnParams, ImageParams):
    """Settings of a folder of pictures.

    Attributes
    ----------
    size : int
        Pixels of a side: shorter side scaled, middle cropped.
    channels : {1, 3}
        Grey or colour.
    classes : sequence of str
        Names of all classes in the order of their labels; empty for the sorted folder names.
    """

    size: int = Field(default=32, ge=1)
    channels: Literal[1, 3] = 3
    classes: tuple[str, ...] = ()


def _classes(params: Params, folder: Path) -> tuple[str, ...]:
    """Return the class names; a folder outside `classes` is an error."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: no class folders in it. Put pictures into {folder}/CLASS/.")
    if unknown := [name for name in found if params.classes and name not in params.classes]:
        raise DataError(f"{folder / unknown[0]}: not one of task.classes. {nearest(unknown[0], params.classes)}")
    return params.classes or tuple(found)


def _listing(folder: Path, classes: tuple[str, ...]) -> Listing:
    from torchvision.datasets.folder import make_dataset

    number = {name: label for label, name in enumerate(classes) if (folder / name).is_dir()}
    found = make_dataset(str(folder), class_to_idx=number, extensions=ENDINGS, allow_empty=True)
    if not found:
        raise DataError(f"{folder}: no pictures in its class folders ({', '.join(ENDINGS)}).")
    return [(Path(path), label) for path, label in found]


def load(params: Params) -> Task:
    """Return the folder's pictures; raw inputs are uint8 ``(n, channels, size, size)``."""
    root = params.root
    if not root.is_dir():
        raise DataError(f"{root.absolute()}: no such folder. Put pictures into {root}/CLASS/ or set task.root.")
    parts = [part for part in PARTS if (root / part).is_dir()]
    if "test" in parts:
        classes = _classes(params, root / parts[0])
        listings: dict[str, Listing] = {"train": [], **{part: _listing(root / part, classes) for part in parts}}
    else:
        classes = _classes(params, root)
        whole = _listing(root, classes)
        rows = stratified(np.array([label for _, label in whole]), params.test_fraction, "folder test split")
        listings = {part: [whole[row] for row in chosen] for part, chosen in zip(PARTS, rows)}
    return finished("folder", pictures("folder", listings, params.size, params.channels), params, root, classes)


def outline(params: Params) -> Task | None:
    """Return the task without pictures, for who has none; None if classes are not set, or if the folder is there."""
    if not params.classes or params.root.is_dir():
        return None
    shape = (params.channels, params.size, params.size)
    none = Examples(np.empty((0, *shape), np.uint8), np.empty(0, np.int64))
    prepare = params.normaliser(channels=params.channels)
    return Task("folder", none, none, len(params.classes), shape, prepare, label_names=params.classes)
