"""Words of short texts: splitting, vocabulary, padded ids and GloVe vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Array, Arrays
from fedcross.tasks.reading.params import LimitParams, split_parts, stratified

PAD, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unknown>")
_WORD = re.compile(r"\w+(?:'\w+)*|[.,!?;]")
PURPOSE = "text test split"


class WordParams(LimitParams):
    """Settings of texts.

    Attributes
    ----------
    length : int
        Words of a text that are read; the rest is cut, shorter ones are padded on the left.
    vocabulary : int
        Most token ids, with those for padding and unknown words.
    """

    length: int = Field(default=25, ge=1)
    vocabulary: int = Field(default=10_000, ge=len(SPECIAL) + 1)


def text_arrays(
    parts: Mapping[str, Arrays], texts: Mapping[str, Sequence[str]], params: WordParams, fraction: float
) -> Arrays:
    """Return the `texts` of the `parts` as token ids, and ``words``; these come from the texts to train on alone.

    Each part has its ``y`` and, with owners, ``u``; without a part ``test``, `fraction` of every class is held out.
    """
    y, split = parts["train"]["y"], {part: [split_words(text) for text in found] for part, found in texts.items()}
    kept = range(len(y)) if "test" in parts else stratified(y, fraction, PURPOSE)[0]
    words = vocabulary((split["train"][row] for row in kept), params.vocabulary)
    whole = {part: {"x": word_ids(split[part], words, params.length), **arrays} for part, arrays in parts.items()}
    return {**split_parts(whole, fraction, PURPOSE), "words": np.array(words)}


def split_words(text: str) -> list[str]:
    """Return the lower-case words and sentence marks of `text`."""
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[Sequence[str]], size: int, allowed: Container[str] | None = None) -> list[str]:
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
        row[length - len(kept) :] = kept
    return out


def read_glove(path: Path, wanted: Container[str]) -> dict[str, Array]:
    """Return the float32 vectors of those `wanted` words that the GloVe text file has."""
    found: dict[str, Array] = {}
    with path.open(encoding="utf-8", errors="replace") as file:  # a word that is not UTF-8 is none of the text's
        for number, line in enumerate(file, start=1):
            word, *values = line.rstrip().split(" ")
            if word in wanted:
                try:
                    found[word] = np.array(values, dtype=np.float32)
                except ValueError as error:
                    raise DataError(f"{path}: line {number} is not a word and numbers ({error}).") from error
    if not found or len({len(vector) for vector in found.values()}) > 1:
        raise DataError(f"{path}: no vectors of one length for the words of the training text. Is it a GloVe file?")
    return found
