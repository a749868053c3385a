"""Shakespeare: predict the next character from the 80 before it; a user is a role in a play.

Source: S. Caldas et al., "LEAF", arXiv 1812.01097; B. McMahan et al., AISTATS 2017.
Layout: LEAF's JSON in ``root/shakespeare/data/{train,test}/*.json`` with ``x`` strings of 80 characters and ``y``
one character each.
"""

from __future__ import annotations

import string
from itertools import chain

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Array, cached
from fedcross.tasks.reading.params import FileParams, finished

LENGTH = 80
#: LEAF's 80 characters, in code point order; a character's id is its position.
ALPHABET = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
IDS = {character: number for number, character in enumerate(ALPHABET)}
CURE = "Make LEAF's files with its data/shakespeare/preprocess.sh (-s niid -t sample) and put data/ here."


class Params(FileParams):
    """Settings of Shakespeare: folder and limits."""


def _encode(data: leaf.UserData) -> tuple[Array, Array]:
    """Return token ids uint8 ``(n, 80)`` and next characters int64 ``(n,)`` of one role."""
    for x, y in zip(data.x, data.y):
        if not (isinstance(x, str) and isinstance(y, str)) or len(x) != LENGTH or len(y) != 1:
            raise DataError(f"{data.where}: {x!r} -> {y!r} is not {LENGTH} characters and the one that follows.")
    try:
        x_ids = np.fromiter((IDS[one] for text in data.x for one in text), np.uint8).reshape(-1, LENGTH)
        return x_ids, np.array([IDS[one] for one in data.y], np.int64)
    except KeyError as error:
        raise DataError(f"{data.where}: the character {error} is not one of LEAF's {len(ALPHABET)}.") from error


def load(params: Params) -> Task:
    """Return Shakespeare with its roles as users; raw inputs are uint8 token ids ``(n, 80)``."""
    folder = params.root / "shakespeare" / "data"
    files = leaf.find_files(folder, "Shakespeare", params, CURE)

    def decode(_: object) -> dict[str, Array]:
        return leaf.decode({part: leaf.read(paths) for part, paths in files.items()}, _encode)

    arrays = cached("shakespeare", chain(*files.values()), {}, decode)
    return finished("shakespeare", arrays, params, folder, tuple(ALPHABET), vocabulary=len(ALPHABET))
