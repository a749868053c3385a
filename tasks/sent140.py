"""Sent140: classify tweets as positive or negative; a user is the author of tweets.

Source: A. Go et al., "Twitter Sentiment Classification using Distant Supervision" (2009), by user as in LEAF, arXiv
1812.01097. Layout: LEAF's JSON, either split in ``root/sent140/data/{train,test}/*.json`` or whole in
``root/sent140/data/all_data.json`` (or ``data/all_data/all_data.json``). ``x`` holds LEAF's records ``[id, date, query,
user, text, ...]`` and ``y`` is 0 or 1.

Words: the papers used LEAF's GloVe vocabulary. With a GloVe text file (`glove`) the ids are those of the training
text's words that have a vector; without one they are those of its most frequent words. A log line says which. The
vectors lie in the cache as ``vectors.npy``; the same line names the file for ``model.vectors``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.params import FileParams, require, token_ids
from fedcross.tasks.reading.words import SPECIAL, read_glove, split_words, vocabulary, word_ids

logger = logging.getLogger(__name__)

TEXT = 4
"""Position of the text in LEAF's record."""
HELP = (
    "Make LEAF's files with its data/sent140/preprocess.sh (-s niid -t sample) and put data/train and data/test here, "
    "or its all_data.json."
)


class Params(FileParams):
    """Settings of Sent140.

    Attributes
    ----------
    length : int
        Words of a tweet that are read; the rest is cut, shorter ones are padded on the left.
    vocabulary : int
        Most token ids, with those for padding and unknown words.
    glove : Path or None
        GloVe text file (``word number number ...`` per line); relative to ``root/sent140``.
    test_fraction : float
        Share of each author's tweets that is held out if the files are not split; an author of one keeps it.
    """

    length: int = Field(default=25, ge=1)
    vocabulary: int = Field(default=10_000, ge=len(SPECIAL) + 1)
    glove: Path | None = None
    test_fraction: float = Field(default=0.1, gt=0, lt=1)


def _parts(files: dict[str, list[Path]], fraction: float) -> dict[str, list[leaf.UserData]]:
    """Return the authors of the training and test files; hold tweets out if there is only one file."""
    if "all" not in files:
        return {part: list(leaf.read_all(paths)) for part, paths in files.items()}
    parts: dict[str, list[leaf.UserData]] = {"train": [], "test": []}
    users = sorted(leaf.read_all(files["all"]), key=lambda data: data.user)
    for number, data in enumerate(users):
        n = len(data.y)
        held = min(math.ceil(fraction * n), max(n - 1, 0))
        order = stream(0, "sent140 test split", number).permutation(n)
        for part, chosen in (("test", np.sort(order[:held])), ("train", np.sort(order[held:]))):
            x, y = [data.x[i] for i in chosen], [data.y[i] for i in chosen]
            parts[part].append(leaf.UserData(data.file, data.user, x, y))
    return parts


def _words(data: leaf.UserData) -> list[list[str]]:
    for record in data.x:
        if not isinstance(record, list) or len(record) <= TEXT or not isinstance(record[TEXT], str):
            raise DataError(f"{data.where}: {record!r} is not LEAF's [id, date, query, user, text].")
    return [split_words(record[TEXT]) for record in data.x]


def _vocabulary(params: Params, glove: Path | None, texts: Iterable[list[str]], store: Store) -> list[str]:
    """Return the words by id, and store the vectors if there are any (padding and unknown words: zeros)."""
    if glove is None:
        return vocabulary(texts, params.vocabulary)
    texts = list(texts)
    vectors = read_glove(glove, frozenset(word for words in texts for word in words))
    words = vocabulary(texts, params.vocabulary, frozenset(vectors))
    width = len(next(iter(vectors.values())))
    zeros = np.zeros(width, np.float32)
    store.put("vectors", np.stack([vectors.get(word, zeros) for word in words]))
    return words


def _files(folder: Path) -> dict[str, list[Path]]:
    for whole in (folder / "all_data.json", folder / "all_data" / "all_data.json"):
        if whole.is_file() and not (folder / "train").is_dir():
            return {"all": [whole]}
    return leaf.find_files(folder, "Sent140", HELP)


def load(params: Params) -> Task:
    """Return Sent140 with its authors as users; raw inputs are int32 token ids ``(n, length)``.

    Raises
    ------
    DataError
        If files are missing or wrong; the message names the file and the author.
    """
    leaf.no_download(params.download, "Sent140", HELP)
    folder = params.root / "sent140"
    files = _files(folder / "data")
    sources = [path for paths in files.values() for path in paths]
    glove = None if params.glove is None else folder / params.glove
    if glove is not None:
        require([glove], "Sent140", "Put a GloVe text file there (say glove.6B.100d.txt), or set task.glove=null.")
        sources.append(glove)

    def decode(store: Store) -> None:
        parts = _parts(files, params.test_fraction)
        words = _vocabulary(params, glove, (text for data in parts["train"] for text in _words(data)), store)
        store.put("words", np.array(words))
        leaf.decode(parts, lambda data: (word_ids(_words(data), words, params.length), leaf.labels(data, 2)), store)

    keys = params.model_dump(mode="json", include={"length", "vocabulary", "test_fraction", "glove"})
    arrays = cached("sent140", sources, keys, decode)
    size = len(arrays["words"])
    if glove is None:
        logger.info("sent140: vocabulary of %d words from the training text (no task.glove)", size)
    else:
        file = getattr(arrays["vectors"], "filename", None)
        logger.info("sent140: %d words with GloVe vectors; for fixed vectors set model.vectors=%s", size, file)
    examples = leaf.examples(arrays, 2, folder, params)
    return Task(
        name="sent140",
        train=examples["train"],
        test=examples["test"],
        classes=2,
        shape=(params.length,),
        prepare=token_ids,
        vocabulary=size,
        label_names=("negative", "positive"),
        user_names=tuple(str(name) for name in arrays["names"]),
        alone=False,  # the vocabulary comes from everybody's text
    )
