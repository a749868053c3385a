"""What the defence does with the statistics of batch normalisation, and other entries that are not trained.

The server averages them as it does parameters, and the model's answers depend on them: a running mean of 100 from one
device of ten made every answer of the global model a guess, with all parameters sound.

An entry's *change* is the root mean square of ``upload - dispatched`` over its values. A change of more than
``quarantine`` times the usual one of that entry is shortened to that. Nobody is shut out for it, as batches of a skewed
client have other statistics. An entry that most of those who trained leave as it was is a constant (a table of
positions, an index, a mask): it stays as it was. A variance below zero is none: who sends one where none was sent is
shut out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedcross.strategies.defence.rules import JUDGED, Judgement, lower_median, scale_update, update_norm, usual
from fedcross.strategies.pool.layout import Array

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
    parameters: Collection[str],
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
    parameters, names : collection of str
        The trained entries, which show who has trained, and the entries that are judged.
    most : float
        A change is at most this many usual ones.
    known : mapping
        Entry -> its usual change before, where that is known; 0 for a constant.

    Returns
    -------
    tuple
        The uploads with ``clipped``, the number of those of which an entry was shortened; and entry -> its usual
        change, of those where the uploads are enough to know it.
    """
    kept, changed, found = list(uploads), set(), {}
    trained = [_trained(upload.arrays, model, parameters) for upload, model in zip(uploads, sent, strict=True)]
    for name in names:
        having = [i for i, model in enumerate(sent) if name in uploads[i].arrays and name in model]
        changes = {i: _change(uploads[i].arrays, sent[i], name) for i in having}
        limit, usually = _usual([changes[i] for i in having if trained[i]], known.get(name))
        if usually is not None and usually < math.inf:
            found[name] = usually
        for i, change in changes.items():
            if change > most * limit:
                kept[i] = replace(kept[i], arrays=scale_update(kept[i].arrays, sent[i], [name], most * limit / change))
                changed.add(i)
    return Judgement(kept, [], len(changed)), found


def _usual(changes: Sequence[float], known: float | None) -> tuple[float, float | None]:
    """Return the usual change of an entry, and what to remember of it, from those of the clients that trained."""
    if changes and not lower_median(changes) and (len(changes) >= JUDGED or not known):
        return 0.0, 0.0 if len(changes) >= JUDGED else None
    limit, median = usual(changes, known or 0.0)
    return (0.0 if known == 0 else limit), median


def _trained(upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]) -> bool:
    return any(name in upload and name in model and bool((upload[name] != model[name]).any()) for name in parameters)


def _change(upload: Mapping[str, Array], model: Mapping[str, Array], name: str) -> float:
    return update_norm(upload, model, [name]) / math.sqrt(max(upload[name].size, 1))
