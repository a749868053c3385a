"""Defence against well-formed but poisoned uploads: the server quarantines far too large updates and clips large ones.

The guard has already rejected uploads with NaN or infinite values. An upload's *update* is the change of the parameters
since dispatch, ``u = upload - dispatched``; of other entries see :mod:`strategies.defence.buffers`. With ``M``
the median of the exchange's update norms, the server treats an upload with ``|u| > quarantine * M`` as lost, and
replaces any other with ``|u| > clip * M`` by ``dispatched + u * clip * M / |u|``. It does not judge the direction of an
update: measured on skewed clients, a test of directions flags 15 % of the honest ones. More examples make a longer
update: the first limit is as many times larger as a client has the median number of examples, `weight` times at most.

``M`` is at most three times what was usual in earlier exchanges: in one round the hostile may be the majority of those
drawn, though they are few of all.

Norms below a hundredth of the lower median, or 0, do not count in ``M``: who returns the model as it was says nothing
of the others. Of fewer than three that are left none stands out. Their mean is then ``M``, but at most what was usual
before or, if that is more, three times the smaller one: one of two may be false, and raise the mean as it likes. The
smaller one itself would shut one of two honest clients of skewed data out for good, where a third device is away.

A client reports its number of examples itself, and methods that weight by this number would believe any value. An
upload that reports more than ``weight`` times the exchange's median counts as that many. FedCross mixes models with
equal weights and does not use the number at all.

Slices of a model count with the length that they have, and are judged in their bands too
(:mod:`strategies.defence.bands`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.pool.layout import Array, Arrays

if TYPE_CHECKING:
    from fedcross.strategies.wire.protocol import Upload

N = TypeVar("N", int, float)

#: An update below this part of the lower median is none: it does not count in the median that others are judged by.
IDLE = 0.01
#: The most that ``M`` may be: in the smaller of two norms of which one may be false, and in what was usual before.
SPREAD = 3.0
#: Uploads that a median can judge: of two, each is as unusual as the other.
JUDGED = 3
#: Values converted to float64 at a time (512 KiB), so that no second copy of a model is needed.
BLOCK = 1 << 16


class Defence(Settings):
    """``enabled`` turns the defence on or off; `quarantine` and `clip` are multiples of the exchange's median update
    norm, `weight` is a multiple of its median number of examples.
    """

    enabled: bool = False
    quarantine: float = Field(3.0, ge=1)
    clip: float = Field(1.0, gt=0)
    weight: float = Field(3.0, ge=1)


@dataclass(frozen=True)
class Judgement:
    """The defence's result for one exchange.

    Attributes
    ----------
    uploads : list of Upload
        The accepted uploads in their order, clipped where necessary.
    quarantined : list of tuple
        (upload, update norm, limit) of the others.
    clipped : int
        Number of `uploads` that were clipped.
    lightened : int
        Number of `uploads` whose reported number of examples was lowered.
    usual : float or None
        The median of their norms, for later exchanges; None if they were too few to know what is usual.
    """

    uploads: list[Upload]
    quarantined: list[tuple[Upload, float, float]]
    clipped: int
    lightened: int = 0
    usual: float | None = None


def defend(
    settings: Defence,
    uploads: Sequence[Upload],
    sent: Sequence[Mapping[str, Array]],
    parameters: Collection[str],
    known: float = 0.0,
    lone: bool = True,
) -> Judgement:
    """Quarantine and clip `uploads`; return those that may be aggregated, and counts.

    Parameters
    ----------
    settings : Defence
        The three multiples; the caller checks ``enabled``.
    uploads : sequence of Upload
        The uploads that the guard accepted in one exchange; their arrays are never written to.
    sent : sequence of mapping
        The model that the server sent for each upload, in the same order.
    parameters : collection of str
        Names of the trained entries.
    known, lone
        See :func:`usual`.
    """
    kept: list[Upload] = []
    quarantined: list[tuple[Upload, float, float]] = []
    norms = [update_norm(upload.arrays, model, parameters) for upload, model in zip(uploads, sent)]
    if not norms:
        return Judgement([], [], 0)
    median, found = usual(norms, known, lone)
    clipped, size = 0, lower_median([upload.num_examples for upload in uploads])
    for upload, model, norm in zip(uploads, sent, norms):
        limit = settings.quarantine * median * min(max(upload.num_examples / size, 1.0), settings.weight)
        if not norm <= limit:  # written so that an infinite norm never passes
            quarantined.append((upload, norm, limit))
        elif norm > settings.clip * median:
            scaled = scale_update(upload.arrays, model, parameters, settings.clip * median / norm)
            kept.append(replace(upload, arrays=scaled))
            clipped += 1
        elif math.isfinite(norm):
            kept.append(upload)
        else:  # the median itself is infinite: most uploads are unusable, so none is accepted
            quarantined.append((upload, norm, limit))
    kept, lightened = bounded(kept, settings.weight)
    return Judgement(kept, quarantined, clipped, lightened, found)


def usual(norms: Sequence[float], known: float = 0.0, lone: bool = True) -> tuple[float, float | None]:
    """Return the norm ``M`` that these are compared with, and their median if they are enough to know it.

    Parameters
    ----------
    norms : sequence of float
        Those of one exchange. Those next to nothing beside the others' (:data:`IDLE`), and zeros, do not count.
    known : float
        What was usual before; 0 if that is not known.
    lone : bool
        Whether one norm alone is usual if nothing is known.

    Returns
    -------
    tuple
        ``M``: from :data:`JUDGED` norms on their median, where others did not count at most :data:`SPREAD` times the
        :func:`lower_median`. Of two it is their mean, at most `known` or, if that is more, :data:`SPREAD` times the
        smaller one; of one at most `known`. It is never more than :data:`SPREAD` times `known`. Then the median.
    """
    most = SPREAD * known or math.inf
    middle = lower_median(norms) if len(norms) else 0.0  # the mean of two would make the honest one idle
    working = [norm for norm in norms if norm > 0 and not norm < IDLE * middle]
    if not working:
        return known, None
    if len(working) >= JUDGED:
        median = float(np.median(working))
        if len(working) < len(norms):
            median = min(median, SPREAD * lower_median(working))
        return min(median, most), median
    if len(working) > 1:
        return min(float(np.mean(working)), max(known, SPREAD * min(working)), most), None
    return min(working[0], known or (working[0] if lone else 0.0)), None


def bounded(uploads: Sequence[Upload], most: float) -> tuple[list[Upload], int]:
    """Return `uploads` with numbers of examples capped at `most` times their median, and how many were capped.

    The median is the :func:`lower_median`.
    """
    counts = [upload.num_examples for upload in uploads]
    if not counts:
        return [], 0
    limit = max(1, int(most * lower_median(counts)))
    fair = [u if u.num_examples <= limit else replace(u, num_examples=limit) for u in uploads]
    return fair, sum(u.num_examples > limit for u in uploads)


def shortened(uploads: Sequence[Upload], group: str, name: str, lengths: Sequence[float], most: float) -> Judgement:
    """Return `uploads` whose extra array `name` of `group` is scaled to at most `most` times the :func:`usual` length.

    `lengths` are those of the uploads' arrays, in their order; ``Judgement.clipped`` counts the shortened ones.
    """
    limit, kept = most * usual(lengths)[0], list(uploads)
    for i, (upload, length) in enumerate(zip(uploads, lengths, strict=True)):
        if length > limit:
            arrays = upload.extras[group]
            scaled = (arrays[name].astype(np.float64) * (limit / length)).astype(arrays[name].dtype)
            kept[i] = replace(upload, extras={**upload.extras, group: {**arrays, name: scaled}})
    return Judgement(kept, [], sum(length > limit for length in lengths))


def lower_median(values: Sequence[N]) -> N:
    """Return the median; of an even number of values the lower middle one: a false value could raise a mean."""
    return sorted(values)[(len(values) - 1) // 2]


def update_norm(upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]) -> float:
    """Return the Euclidean norm of ``upload - model`` over `parameters`, summed in float64, block by block."""
    total = 0.0
    for name in in_both(upload, model, parameters):
        new, old = upload[name].reshape(-1), model[name].reshape(-1)
        for start in range(0, len(new), BLOCK):
            part = slice(start, start + BLOCK)
            difference = np.subtract(new[part], old[part], dtype=np.float64)
            total += float(difference @ difference)
    return math.sqrt(total)


def scale_update(
    upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str], factor: float
) -> Arrays:
    """Return ``model + factor * (upload - model)`` for `parameters` (new arrays), and the upload's other entries.

    Integers are rounded.
    """
    scaled: Arrays = dict(upload)
    for name in in_both(upload, model, parameters):
        new, old = upload[name].reshape(-1), model[name].reshape(-1)
        result = np.empty_like(new)
        for start in range(0, len(new), BLOCK):
            part = slice(start, start + BLOCK)
            base = old[part].astype(np.float64)
            result[part] = rounded(result.dtype, base + factor * (new[part] - base))
            if result.dtype.kind in "iu":  # float64 lacks large ones
                np.copyto(result[part], new[part], where=new[part] == old[part])
        scaled[name] = result.reshape(upload[name].shape)
    return scaled


def rounded(kind: np.dtype[Any], values: Array) -> Array:
    """Return float64 `values` for an array of `kind`: rounded for integers, and no larger than these can be."""
    if not np.issubdtype(kind, np.integer):
        return values
    ends = np.iinfo(kind)
    largest = float(ends.max)  # of int64 it is one too large
    return np.clip(np.rint(values), ends.min, largest if int(largest) == ends.max else np.nextafter(largest, 0))


def in_both(upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]) -> list[str]:
    """Return the parameters that are in both models: a method may send fewer arrays than it gets back."""
    return [name for name in parameters if name in upload and name in model]
