"""Tiny ImageNet: 100,000 + 10,000 colour pictures of 64x64 pixels, 200 classes.

Source: Stanford CS231n's subset of ImageNet (2015). The published test pictures have no labels, so the validation set
is the test set, as is usual.
Layout: ``root/tiny-imagenet-200/`` with ``wnids.txt``, ``words.txt``, ``train/WNID/images/*.JPEG`` and ``val/`` with
``images/*.JPEG`` and ``val_annotations.txt`` (tab-separated: file, WNID, box).
"""

from __future__ import annotations

from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published, read_lines
from fedcross.tasks.reading.pictures import pictures

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


def load(params: Params) -> Task:
    """Return Tiny ImageNet; raw inputs are uint8 ``(n, 3, size, size)``."""
    folder = params.root / "tiny-imagenet-200"
    lists = [folder / "wnids.txt", folder / "val" / "val_annotations.txt"]

    def download() -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        if not all(path.is_file() for path in lists):
            download_and_extract_archive(URL, str(params.root), md5=MD5)

    cure = f"Unpack tiny-imagenet-200.zip into {params.root.absolute()}"
    published("Tiny ImageNet", lists, params, f"{cure}, or set task.download=true.", download)
    number = {wnid: label for label, wnid in enumerate(" ".join(read_lines(lists[0])).split())}
    found = {wnid: sorted((folder / "train" / wnid / "images").glob("*.JPEG")) for wnid in number}
    train, test = [(path, number[wnid]) for wnid, paths in found.items() for path in paths], []
    for line in read_lines(lists[1]):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in number:
            raise DataError(f"{lists[1]}: {wnid!r} of {name!r} is not a class of wnids.txt.")
        test.append((folder / "val" / "images" / name, number[wnid]))
    published("Tiny ImageNet", [path for path, _ in test], params, f"{lists[1]} names them. {cure} again.", download)
    words = folder / "words.txt"
    known = dict(line.split("\t", 1) for line in (read_lines(words) if words.is_file() else ()) if "\t" in line)
    names = [known.get(wnid, wnid).split(",")[0] for wnid in number]
    arrays = pictures("tinyimagenet", {"train": train, "test": test}, params.size, 3)
    return finished("tinyimagenet", arrays, params, folder, names)
