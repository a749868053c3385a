"""Your own pictures: one folder per class, for example on an edge device.

Layout: ``root/train/CLASS/*`` and ``root/test/CLASS/*``, or only ``root/CLASS/*``, of which `test_fraction` is held
out; ``root/test`` alone is for a machine that only evaluates, the server of a real federation. Labels are the positions
in `classes`, else in the sorted folder names: give `classes` wherever a device may lack a class, so that all devices
number them alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError, nearest
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.params import ImageParams, checked, limited, stratified
from fedcross.tasks.reading.pictures import Listing, decode_pictures, take


class Params(ImageParams):
    """Settings of a folder of pictures.

    Attributes
    ----------
    root : Path
        The folder.
    size : int
        Pixels of a side: shorter side scaled, middle cropped.
    channels : {1, 3}
        Grey or colour.
    classes : sequence of str
        Names of all classes in the order of their labels; empty for the sorted folder names.
    test_fraction : float
        Share of every class that is held out if there are no train and test folders.
    """

    root: Path
    size: int = Field(default=32, ge=1)
    channels: Literal[1, 3] = 3
    classes: tuple[str, ...] = ()
    test_fraction: float = Field(default=0.2, ge=0, lt=1)


def _classes(params: Params, folder: Path) -> tuple[str, ...]:
    """Return the class names; a folder outside `classes` is an error."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: no class folders in it. Put pictures into {folder}/CLASS/.")
    unknown = [name for name in found if params.classes and name not in params.classes]
    if unknown:
        raise DataError(f"{folder / unknown[0]}: not one of task.classes. {nearest(unknown[0], params.classes)}")
    return params.classes or tuple(found)


def _listing(folder: Path, classes: tuple[str, ...]) -> Listing:
    from torchvision.datasets.folder import make_dataset

    number = {name: label for label, name in enumerate(classes) if (folder / name).is_dir()}
    extensions = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
    found = make_dataset(str(folder), class_to_idx=number, extensions=extensions, allow_empty=True)
    if not found:
        raise DataError(f"{folder}: no pictures in its class folders ({', '.join(extensions)}).")
    return [(Path(path), label) for path, label in found]


def load(params: Params) -> Task:
    """Return the folder's pictures; raw inputs are uint8 ``(n, channels, size, size)``.

    Raises
    ------
    DataError
        If the folder is missing or empty, holds an unknown class or a damaged picture; the message names it.
    """
    root = params.root
    if not root.is_dir():
        raise DataError(f"{root.absolute()}: no such folder. Put pictures into {root}/CLASS/ or set task.root.")
    parts = [part for part in ("train", "test") if (root / part).is_dir()]
    split = "test" in parts
    if split:
        classes = _classes(params, root / parts[0])
        listings: dict[str, Listing] = {"train": [], **{part: _listing(root / part, classes) for part in parts}}
    else:
        classes = _classes(params, root)
        whole = _listing(root, classes)
        kept, held = stratified(np.array([label for _, label in whole]), params.test_fraction, "folder test split")
        listings = {"train": take(whole, kept), "test": take(whole, held)}

    def decode(store: Store) -> None:
        for part, listing in listings.items():
            decode_pictures(part, listing, params.size, params.channels, store)

    sources = [path for listing in listings.values() for path, _ in listing]
    keys = params.model_dump(include={"size", "channels", "classes", "test_fraction"})
    arrays = cached("folder", sources, {**keys, "split": split}, decode)
    n, idle = len(classes), not listings["train"]
    return Task(
        name="folder",
        train=limited(checked(arrays["x_train"], arrays["y_train"], n, root, empty=idle), params.limit, "train"),
        test=limited(checked(arrays["x_test"], arrays["y_test"], n, root, empty=True), params.limit_test, "test"),
        classes=n,
        shape=(params.channels, params.size, params.size),
        prepare=params.normaliser(channels=params.channels),
        augment=params.augmentation(),
        label_names=classes,
    )


def outline(params: Params) -> Task | None:
    """Return the task without pictures, for who has none; None if classes are not set, or if the folder is there."""
    if not params.classes or params.root.is_dir():
        return None
    shape = (params.channels, params.size, params.size)
    none = Examples(np.empty((0, *shape), np.uint8), np.empty(0, np.int64))
    return Task(
        name="folder",
        train=none,
        test=none,
        classes=len(params.classes),
        shape=shape,
        prepare=params.normaliser(channels=params.channels),
        label_names=params.classes,
    )
