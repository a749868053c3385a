"""Sent140: classify tweets as positive or negative; a user is the author of tweets.

Source: A. Go et al., "Twitter Sentiment Classification using Distant Supervision" (2009), by user as in LEAF, arXiv
1812.01097. Layout: LEAF's JSON, either split in ``root/sent140/data/{train,test}/*.json`` or whole in
``root/sent140/data/all_data.json`` (or ``data/all_data/all_data.json``). ``x`` holds LEAF's records ``[id, date, query,
user, text, ...]`` and ``y`` is 0 or 1.

Words: the papers used LEAF's GloVe vocabulary. With a GloVe text file (`glove`) the ids are those of the training
text's words that have a vector; without one they are those of its most frequent words. The vectors lie in the cache as
``vectors.npy``; a log line names the file for ``model.vectors``.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Arrays, cached
from fedcross.tasks.reading.params import FileParams, finished, published
from fedcross.tasks.reading.words import WordParams, read_glove, split_words, vocabulary, word_ids

logger = logging.getLogger(__name__)

TEXT = 4
"""Position of the text in LEAF's record."""
CURE = (
    "Make LEAF's files with its data/sent140/preprocess.sh (-s niid -t sample) and put data/train and data/test here, "
    "or its all_data.json."
)


class Params(FileParams, WordParams):
    """Settings of Sent140.

    Attributes
    ----------
    glove : Path or None
        GloVe text file (``word number number ...`` per line); relative to ``root/sent140``.
    test_fraction : float
        Share of each author's tweets that is held out if the files are not split; an author of one keeps it.
    """

    glove: Path | None = None
    test_fraction: float = Field(default=0.1, gt=0, lt=1)


def _held_out(users: list[leaf.UserData], fraction: float) -> dict[str, list[leaf.UserData]]:
    """Return the authors' tweets in two parts."""
    parts: dict[str, list[leaf.UserData]] = {"train": [], "test": []}
    for number, data in enumerate(sorted(users, key=lambda data: data.user)):
        n = len(data.y)
        held = min(math.ceil(fraction * n), max(n - 1, 0))
        order = stream(0, "sent140 test split", number).permutation(n)
        for part, rows in (("test", np.sort(order[:held])), ("train", np.sort(order[held:]))):
            parts[part].append(data._replace(x=[data.x[i] for i in rows], y=[data.y[i] for i in rows]))
    return parts


def _words(data: leaf.UserData) -> list[list[str]]:
    for record in data.x:
        if not isinstance(record, list) or len(record) <= TEXT or not isinstance(record[TEXT], str):
            raise DataError(f"{data.where}: {record!r} is not LEAF's [id, date, query, user, text].")
    return [split_words(record[TEXT]) for record in data.x]


def _decode(files: dict[str, list[Path]], params: Params, glove: Path | None) -> Arrays:
    users = {part: list(leaf.read(paths)) for part, paths in files.items()}
    parts = _held_out(users["all"], params.test_fraction) if "all" in users else users
    texts = [words for data in parts["train"] for words in _words(data)]
    vectors = None if glove is None else read_glove(glove, {word for words in texts for word in words})
    words = vocabulary(texts, params.vocabulary, vectors)
    arrays = leaf.decode(parts, lambda data: (word_ids(_words(data), words, params.length), leaf.labels(data, 2)))
    if vectors is not None:
        zeros = np.zeros_like(next(iter(vectors.values())))  # for padding and unknown words
        arrays["vectors"] = np.stack([vectors.get(word, zeros) for word in words])
    return arrays | {"words": np.array(words)}


def load(params: Params) -> Task:
    """Return Sent140 with its authors as users; raw inputs are int32 token ids ``(n, length)``."""
    folder = params.root / "sent140"
    whole = [folder / "data" / "all_data.json", folder / "data" / "all_data" / "all_data.json"]
    found = [path for path in whole if path.is_file() and not (folder / "data" / "train").is_dir()]
    files = {"all": found[:1]} if found else leaf.find_files(folder / "data", "Sent140", params, CURE)
    sources = [path for paths in files.values() for path in paths]
    glove = None if params.glove is None else folder / params.glove
    sources += [glove] if glove is not None else []
    published("Sent140", sources, params, f"{CURE} Or set task.glove=null.")
    keys = params.model_dump(mode="json", include={"length", "vocabulary", "test_fraction", "glove"})
    arrays = cached("sent140", sources, keys, lambda _: _decode(files, params, glove))
    if glove is not None:
        file = getattr(arrays["vectors"], "filename", None)
        logger.info("sent140: words with GloVe vectors; for fixed vectors set model.vectors=%s", file)
    return finished("sent140", arrays, params, folder, ("negative", "positive"))
