"""Tiny ImageNet: 100,000 + 10,000 colour pictures of 64x64 pixels, 200 classes.

Source: Stanford CS231n's subset of ImageNet (2015). The published test pictures have no labels, so the validation set
is the test set, as is usual.
Layout: ``root/tiny-imagenet-200/`` with ``wnids.txt``, ``words.txt``, ``train/WNID/images/*.JPEG`` and ``val/`` with
``images/*.JPEG`` and ``val_annotations.txt`` (tab-separated: file, WNID, box).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, checked, limited, read_lines, require
from fedcross.tasks.reading.pictures import Listing, decode_pictures

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


class Params(FileParams, ImageParams):
    """Settings of Tiny ImageNet.

    Attributes
    ----------
    size : int
        Pixels of a side; 64 is as published, others are scaled.
    """

    size: int = Field(default=64, ge=8)


def _train(folder: Path, wnids: list[str]) -> Listing:
    listing = []
    for label, wnid in enumerate(wnids):
        pictures = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not pictures:
            raise DataError(
                f"{folder / 'train' / wnid / 'images'}: no *.JPEG of class {wnid}. Unpack the archive again."
            )
        listing += [(path, label) for path in pictures]
    return listing


def _test(folder: Path, wnids: list[str]) -> Listing:
    number = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = folder / "val" / "val_annotations.txt"
    listing = []
    for row, line in enumerate(read_lines(annotations), start=1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        if wnid not in number:
            raise DataError(f"{annotations}: line {row}: {wnid!r} is not a class of wnids.txt.")
        listing.append((folder / "val" / "images" / name, number[wnid]))
    require([path for path, _ in listing], "Tiny ImageNet", "val_annotations.txt names them. Unpack the archive again.")
    return listing


def _names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    """Return the first word for each class; the WNID where words.txt has none."""
    file = folder / "words.txt"
    lines = read_lines(file) if file.is_file() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)


def _fetch(root: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive(URL, str(root), md5=MD5)
    except (RuntimeError, OSError) as error:
        raise DataError(f"Tiny ImageNet: the download into {root.absolute()} failed: {error}") from error


def load(params: Params) -> Task:
    """Return Tiny ImageNet; raw inputs are uint8 ``(n, 3, size, size)``.

    Raises
    ------
    DataError
        If a file or class is missing or a picture damaged; the message names it.
    """
    folder = params.root / "tiny-imagenet-200"
    lists = [folder / "wnids.txt", folder / "val" / "val_annotations.txt"]
    if params.download and not all(path.is_file() for path in lists):
        _fetch(params.root)
    require(
        lists,
        "Tiny ImageNet",
        f"Unpack tiny-imagenet-200.zip into {params.root.absolute()}, or set task.download=true.",
    )
    wnids = " ".join(read_lines(lists[0])).split()
    listings = {"train": _train(folder, wnids), "test": _test(folder, wnids)}

    def decode(store: Store) -> None:
        for part, listing in listings.items():
            decode_pictures(part, listing, params.size, 3, store)

    sources = [*lists, *(path for listing in listings.values() for path, _ in listing)]
    arrays = cached("tinyimagenet", sources, {"size": params.size}, decode)
    classes = len(wnids)
    return Task(
        name="tinyimagenet",
        train=limited(checked(arrays["x_train"], arrays["y_train"], classes, folder), params.limit, "train"),
        test=limited(checked(arrays["x_test"], arrays["y_test"], classes, folder), params.limit_test, "test"),
        classes=classes,
        shape=(3, params.size, params.size),
        prepare=params.normaliser(channels=3),
        augment=params.augmentation(),
        label_names=_names(folder, wnids),
    )
