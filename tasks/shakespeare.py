"""Shakespeare: predict the next character from the 80 before it; a user is a role in a play.

Source: S. Caldas et al., "LEAF", arXiv 1812.01097; B. McMahan et al., AISTATS 2017.
Layout: LEAF's JSON in ``root/shakespeare/data/{train,test}/*.json`` with ``x`` strings of 80 characters and ``y``
one character each.
"""

from __future__ import annotations

import string

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Array, Store, cached
from fedcross.tasks.reading.params import FileParams, token_ids

LENGTH = 80
#: LEAF's 80 characters, in code point order; a character's id is its position.
ALPHABET = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
HELP = "Make LEAF's files with its data/shakespeare/preprocess.sh (-s niid -t sample) and put data/ here."
UNKNOWN = 255
_IDS = np.full(256, UNKNOWN, np.uint8)
_IDS[np.frombuffer(ALPHABET.encode("latin-1"), np.uint8)] = np.arange(len(ALPHABET))


class Params(FileParams):
    """Settings of Shakespeare: folder and limits."""


def ids(text: str, where: str) -> Array:
    """Return the ids of `text` as uint8; raise DataError naming the first character that is not in the alphabet."""
    out: Array = _IDS[np.frombuffer(text.encode("latin-1", errors="replace"), np.uint8)]
    unknown = np.flatnonzero(out == UNKNOWN)
    question = ALPHABET.index("?")  # what `replace` makes of characters above 255
    if len(unknown) == 0 and not text.isascii():
        unknown = np.array([i for i in np.flatnonzero(out == question) if text[i] != "?"])
    if len(unknown):
        raise DataError(f"{where}: the character {text[unknown[0]]!r} is not one of LEAF's {len(ALPHABET)}.")
    return out


def _encode(data: leaf.UserData) -> tuple[Array, Array]:
    """Return token ids uint8 ``(n, 80)`` and next characters int64 ``(n,)`` of one role."""
    for x, y in zip(data.x, data.y):
        if not (isinstance(x, str) and isinstance(y, str)) or len(x) != LENGTH or len(y) != 1:
            raise DataError(f"{data.where}: {x!r} -> {y!r} is not {LENGTH} characters and the one that follows.")
    x_ids = ids("".join(data.x), data.where).reshape(-1, LENGTH)
    return x_ids, ids("".join(data.y), data.where).astype(np.int64)


def load(params: Params) -> Task:
    """Return Shakespeare with its roles as users; raw inputs are uint8 token ids ``(n, 80)``.

    Raises
    ------
    DataError
        If files are missing or wrong; the message names the file and the role.
    """
    leaf.no_download(params.download, "Shakespeare", HELP)
    folder = params.root / "shakespeare" / "data"
    files = leaf.find_files(folder, "Shakespeare", HELP)

    def decode(store: Store) -> None:
        leaf.decode({part: leaf.read_all(files[part]) for part in leaf.PARTS}, _encode, store)

    arrays = cached("shakespeare", [path for paths in files.values() for path in paths], {}, decode)
    examples = leaf.examples(arrays, len(ALPHABET), folder, params)
    return Task(
        name="shakespeare",
        train=examples["train"],
        test=examples["test"],
        classes=len(ALPHABET),
        shape=(LENGTH,),
        prepare=token_ids,
        vocabulary=len(ALPHABET),
        label_names=tuple(ALPHABET),
        user_names=tuple(str(name) for name in arrays["names"]),
    )
