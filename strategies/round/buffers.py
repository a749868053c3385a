"""What the defence does with the statistics of batch normalisation, and other entries that are not trained.

The server averages them as it does parameters, and the model's answers depend on them: a running mean of 100 from one
device of ten made every answer of the global model a guess, with all parameters sound.

An entry's *change* is the root mean square of ``upload - dispatched`` over its values. A change of more than
``quarantine`` times the usual one of that entry is shortened to that. Nobody is shut out for it, as batches of a skewed
client have other statistics. A variance below zero is none: who sends one where none was sent is shut out. Entries of
integers, such as counters, are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedcross.strategies.pool.layout import Array
from fedcross.strategies.round.defence import Judgement, scale_update, update_norm, usual

if TYPE_CHECKING:
    from fedcross.strategies.wire.protocol import Upload

#: How torch calls the variances that batch normalisation keeps.
VARIANCE = "running_var"


def without_variances_below_zero(uploads: Sequence[Upload], sent: Sequence[Mapping[str, Array]]) -> Judgement:
    """Quarantine each upload with a variance below zero that the server had not sent so; its lowest one is named."""
    lowest = [_lowest(upload.arrays, model) for upload, model in zip(uploads, sent, strict=True)]
    kept = [upload for upload, low in zip(uploads, lowest) if low >= 0]
    return Judgement(kept, [(upload, low, 0.0) for upload, low in zip(uploads, lowest) if low < 0], 0)


def _lowest(upload: Mapping[str, Array], model: Mapping[str, Array]) -> float:
    found = [0.0]
    for name, array in upload.items():
        if name.rpartition(".")[2] == VARIANCE and name in model and array.size and not (model[name] < 0).any():
            found.append(float(array.min()))
    return min(found)


def bound(
    uploads: Sequence[Upload],
    sent: Sequence[Mapping[str, Array]],
    names: Collection[str],
    most: float,
    known: Mapping[str, float],
) -> tuple[Judgement, dict[str, float]]:
    """Shorten far too large changes of entries that are not trained.

    Parameters
    ----------
    uploads : sequence of Upload
        Those that the defence keeps; their arrays are never written to.
    sent : sequence of mapping
        The model that the server sent for each upload, in the same order.
    names : collection of str
        The entries; others, and those of integers, stay as they are.
    most : float
        A change is at most this many usual ones.
    known : mapping
        Entry -> its usual change before, where that is known, for an exchange with few uploads.

    Returns
    -------
    tuple
        The uploads with ``clipped``, the number of those of which an entry was shortened; and entry -> its usual
        change, of those where the uploads are enough to know it.
    """
    kept, changed, found = list(uploads), set(), {}
    for name in names:
        having = [i for i, (u, model) in enumerate(zip(uploads, sent, strict=True)) if _judged(name, u.arrays, model)]
        changes = [_change(uploads[i].arrays, sent[i], name) for i in having]
        middle, enough = usual(changes, known.get(name, 0.0))
        if enough and 0 < middle < math.inf:
            found[name] = middle
        for i, change in zip(having, changes):
            if change > most * middle:
                kept[i] = replace(kept[i], arrays=scale_update(kept[i].arrays, sent[i], [name], most * middle / change))
                changed.add(i)
    return Judgement(kept, [], len(changed)), found


def _judged(name: str, upload: Mapping[str, Array], model: Mapping[str, Array]) -> bool:
    return name in upload and name in model and bool(np.issubdtype(upload[name].dtype, np.floating))


def _change(upload: Mapping[str, Array], model: Mapping[str, Array], name: str) -> float:
    return update_norm(upload, model, [name]) / math.sqrt(max(upload[name].size, 1))
