"""Words of short texts: splitting, vocabulary, padded ids and GloVe vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Array

PAD, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unknown>")
_WORD = re.compile(r"\w+(?:'\w+)*|[.,!?;]")


def split_words(text: str) -> list[str]:
    """Return the lower-case words and sentence marks of `text`."""
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[Sequence[str]], size: int, allowed: frozenset[str] | None = None) -> list[str]:
    """Return ``SPECIAL`` and then the most frequent words, `size` entries at most.

    Ties are broken alphabetically, so that the ids do not depend on the order of the texts.
    """
    counts = Counter(word for words in texts for word in words)
    ranked = sorted((-count, word) for word, count in counts.items() if allowed is None or word in allowed)
    return [*SPECIAL, *(word for _, word in ranked[: size - len(SPECIAL)])]


def word_ids(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> Array:
    """Return int32 ids ``(n, length)`` of the first `length` words of each text.

    Short texts are padded on the left, so that the last step of a recurrent model reads the last word.
    """
    number = {word: i for i, word in enumerate(words)}
    out = np.full((len(texts), length), PAD, np.int32)
    for row, text in zip(out, texts):
        kept = [number.get(word, UNKNOWN) for word in text[:length]]
        if kept:
            row[-len(kept) :] = kept
    return out


def read_glove(path: Path, wanted: frozenset[str]) -> dict[str, Array]:
    """Return the float32 vectors of those `wanted` words that the GloVe text file has.

    Raises
    ------
    DataError
        If a line is not a word and numbers, as many as in the lines before; names the file and line.
    """
    found: dict[str, Array] = {}
    width = 0
    with path.open(encoding="utf-8", errors="replace") as file:  # a word that is not UTF-8 is none of the text's
        for number, line in enumerate(file, start=1):
            word, *values = line.rstrip().split(" ")
            width = width or len(values)
            if len(values) != width or width == 0:
                raise DataError(f"{path}: line {number} has {len(values)} numbers, expected {width or 'some'}.")
            if word in wanted:
                try:
                    found[word] = np.array(values, dtype=np.float32)
                except ValueError as error:
                    raise DataError(f"{path}: line {number} is not a word and numbers ({error}).") from error
    if not found:
        raise DataError(f"{path}: has none of the words of the training text. Is it a GloVe text file?")
    return found
