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
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published, read_lines
from fedcross.tasks.reading.pictures import Listing, pictures

CLASSES = 172
CURE = (
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
    validation_list : {"none", "train", "test"}
        Where the pictures of VAL.txt go.
    """

    size: int = Field(default=64, ge=8)
    validation_list: Literal["none", "train", "test"] = "none"


def _listing(folder: Path, name: str, params: Params) -> Listing:
    """Return the pictures of one list file with labels 0..171."""
    file = folder / "SplitAndIngreLabel" / name
    published("VireoFood-172", [file], params, CURE)
    listing = []
    for line in read_lines(file):
        if not (entry := line.strip().split("\t")[0]):
            continue
        match = _LINE.fullmatch(entry)
        if match is None or not 1 <= int(match[1]) <= CLASSES:
            raise DataError(f"{file}: {entry!r} is not /CLASS/name.jpg with a class in 1..{CLASSES}.")
        listing.append((folder / "ready_chinese_food" / entry.lstrip("/"), int(match[1]) - 1))
    published("VireoFood-172", [path for path, _ in listing], params, f"{file} names them. {CURE}")
    return listing


def load(params: Params) -> Task:
    """Return VireoFood-172; raw inputs are uint8 ``(n, 3, size, size)``."""
    folder = params.root / "VireoFood172"
    listings = {part: _listing(folder, name, params) for part, name in (("train", "TR.txt"), ("test", "TE.txt"))}
    if params.validation_list != "none":
        listings[params.validation_list] = [*listings[params.validation_list], *_listing(folder, "VAL.txt", params)]
    foods = folder / "SplitAndIngreLabel" / "FoodList.txt"
    names = read_lines(foods) if foods.is_file() else [str(label) for label in range(CLASSES)]
    if len(names) != CLASSES:
        raise DataError(f"{foods}: {len(names)} dishes, expected {CLASSES}.")
    return finished("vireofood172", pictures("vireofood172", listings, params.size, 3), params, folder, names)
