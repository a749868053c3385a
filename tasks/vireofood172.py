"""VireoFood-172: 110,241 pictures of Chinese dishes, 172 classes.

Source: J. Chen, C.-W. Ngo, "Deep-based Ingredient Recognition for Cooking Recipe Retrieval", ACM MM 2016.
Layout: ``root/VireoFood172/`` with ``ready_chinese_food/K/*.jpg`` (K = 1..172) and ``SplitAndIngreLabel/`` with
``TR.txt``, ``VAL.txt`` and ``TE.txt`` (one ``/K/name.jpg`` per line) and ``FoodList.txt`` (one dish per line).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.leaf import no_download
from fedcross.tasks.reading.params import FileParams, ImageParams, checked, limited, read_lines, require
from fedcross.tasks.reading.pictures import Listing, decode_pictures

CLASSES = 172
HELP = (
    "Ask the authors (VIREO group, City University of Hong Kong) for VireoFood172.zip and SplitAndIngreLabel.zip and "
    "unpack both into the folder VireoFood172 under task.root."
)
_LINE = re.compile(r"/?(\d+)/[^/\s]+")


class Params(FileParams, ImageParams):
    """Settings of VireoFood-172.

    Attributes
    ----------
    size : int
        Pixels of a side: shorter side scaled, middle cropped. FedCT does not state its size.
    validation : {"none", "train", "test"}
        Where the pictures of VAL.txt go.
    """

    size: int = Field(default=64, ge=8)
    validation: Literal["none", "train", "test"] = "none"


def _listing(folder: Path, name: str) -> Listing:
    """Return the pictures of one list file with labels 0..171."""
    file = folder / "SplitAndIngreLabel" / name
    require([file], "VireoFood-172", HELP)
    listing = []
    for row, line in enumerate(read_lines(file), start=1):
        entry = line.strip().split("\t")[0]
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise DataError(f"{file}: line {row}: {entry!r} is not /CLASS/name.jpg.")
        label = int(match[1]) - 1
        if not 0 <= label < CLASSES:
            raise DataError(f"{file}: line {row}: class {match[1]} is not in 1..{CLASSES}.")
        listing.append((folder / "ready_chinese_food" / entry.lstrip("/"), label))
    require([path for path, _ in listing], "VireoFood-172", f"{file} names them. Unpack VireoFood172.zip again.")
    return listing


def load(params: Params) -> Task:
    """Return VireoFood-172; raw inputs are uint8 ``(n, 3, size, size)``.

    Raises
    ------
    DataError
        If a file is missing, a list entry wrong or a picture damaged; the message names it.
    """
    no_download(params.download, "VireoFood-172", HELP)
    folder = params.root / "VireoFood172"
    lists = {"train": ["TR.txt"], "test": ["TE.txt"]}
    if params.validation != "none":
        lists[params.validation].append("VAL.txt")
    listings = {part: [entry for name in names for entry in _listing(folder, name)] for part, names in lists.items()}

    def decode(store: Store) -> None:
        for part, listing in listings.items():
            decode_pictures(part, listing, params.size, 3, store)

    split = folder / "SplitAndIngreLabel"
    sources = [*(split / name for names in lists.values() for name in names)]
    sources += [path for listing in listings.values() for path, _ in listing]
    settings = {"size": params.size, "validation": params.validation}
    arrays = cached("vireofood172", sources, settings, decode)
    foods = split / "FoodList.txt"
    return Task(
        name="vireofood172",
        train=limited(checked(arrays["x_train"], arrays["y_train"], CLASSES, split), params.limit, "train"),
        test=limited(checked(arrays["x_test"], arrays["y_test"], CLASSES, split), params.limit_test, "test"),
        classes=CLASSES,
        shape=(3, params.size, params.size),
        prepare=params.normaliser(channels=3),
        augment=params.augmentation(),
        label_names=tuple(read_lines(foods)) if foods.is_file() else (),
    )
