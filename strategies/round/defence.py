"""What is done about uploads that are well formed but poisoned: quarantine what is far too large, clip the rest.

The guard has already rejected what is not finite. An upload's *update* is what it changed of the parameters it was
sent, ``u = upload - dispatched``; buffers and integer entries are neither measured nor changed. With ``M`` the median
of the exchange's update norms, an upload with ``|u| > quarantine * M`` is treated as lost, and of the others one with
``|u| > clip * M`` becomes ``dispatched + u * clip * M / |u|``. Directions are not judged: measured on skewed clients, a
test of directions flags 15 % of the honest ones.

A client states its number of examples itself, and methods that average by it would believe any number. An upload that
states more than ``weight`` times the median of the exchange counts as that many. FedCross mixes models with equal
weights and does not use the number at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.pool.layout import Array, Arrays

if TYPE_CHECKING:
    from fedcross.strategies.wire.protocol import Upload

#: Values that are converted to float64 at a time: 512 KiB, so no second model is ever held.
BLOCK = 1 << 16


class Defence(Settings):
    """``enabled`` is the one switch; `quarantine` and `clip` are multiples of the round's median update norm, `weight`
    one of the median number of examples.
    """

    enabled: bool = False
    quarantine: float = Field(3.0, ge=1)
    clip: float = Field(1.0, gt=0)
    weight: float = Field(3.0, ge=1)


@dataclass(frozen=True)
class Judgement:
    """What became of one exchange's uploads.

    Attributes
    ----------
    uploads : list of Upload
        Those that stay, in their order, clipped where that was due.
    quarantined : list of tuple
        (upload, update norm, limit) of the others.
    clipped : int
        How many of `uploads` were clipped.
    lightened : int
        How many of `uploads` stated so many examples that they count for fewer.
    """

    uploads: list[Upload]
    quarantined: list[tuple[Upload, float, float]]
    clipped: int
    lightened: int = 0


def defend(
    settings: Defence, uploads: Sequence[Upload], sent: Sequence[Mapping[str, Array]], parameters: Collection[str]
) -> Judgement:
    """Return what of `uploads` may be aggregated.

    Parameters
    ----------
    settings : Defence
        The three multiples; ``enabled`` is the caller's business.
    uploads : sequence of Upload
        What the guard accepted in one exchange; their arrays are never written to.
    sent : sequence of mapping
        The model that each of them was sent, in the same order.
    parameters : collection of str
        Names of the trained entries.

    Notes
    -----
    The median of two is their mean, so with fewer than three uploads nothing stands out. If the median is 0, because
    most clients sent back what they got, every other upload is quarantined.
    """
    kept: list[Upload] = []
    quarantined: list[tuple[Upload, float, float]] = []
    norms = [update_norm(upload.arrays, model, parameters) for upload, model in zip(uploads, sent)]
    if not norms:
        return Judgement([], [], 0)
    median = float(np.median(norms))
    clipped = 0
    for upload, model, norm in zip(uploads, sent, norms):
        if not norm <= settings.quarantine * median:  # written so that an infinite norm never passes
            quarantined.append((upload, norm, settings.quarantine * median))
        elif norm > settings.clip * median:
            scaled = scale_update(upload.arrays, model, parameters, settings.clip * median / norm)
            kept.append(replace(upload, arrays=scaled))
            clipped += 1
        elif math.isfinite(norm):
            kept.append(upload)
        else:  # the median itself is infinite: most uploads are absurd, none is believed
            quarantined.append((upload, norm, settings.quarantine * median))
    kept, lightened = bounded(kept, settings.weight)
    return Judgement(kept, quarantined, clipped, lightened)


def bounded(uploads: Sequence[Upload], most: float) -> tuple[list[Upload], int]:
    """Return `uploads`, none with more examples than `most` times their median, and how many were changed.

    The median of two numbers is their mean, which one liar moves, so of two uploads the smaller number is taken.
    """
    counts = sorted(upload.num_examples for upload in uploads)
    if not counts:
        return [], 0
    limit = max(1, int(most * counts[(len(counts) - 1) // 2]))
    fair = [u if u.num_examples <= limit else replace(u, num_examples=limit) for u in uploads]
    return fair, sum(u.num_examples > limit for u in uploads)


def update_norm(upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]) -> float:
    """Return the Euclidean norm of ``upload - model`` over `parameters`, summed in float64, block by block."""
    total = 0.0
    for name in _common(upload, model, parameters):
        new, old = upload[name].reshape(-1), model[name].reshape(-1)
        for start in range(0, len(new), BLOCK):
            part = slice(start, start + BLOCK)
            difference = np.subtract(new[part], old[part], dtype=np.float64)
            total += float(difference @ difference)
    return math.sqrt(total)


def scale_update(
    upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str], factor: float
) -> Arrays:
    """Return ``model + factor * (upload - model)`` for `parameters`, newly allocated, and the other entries as sent."""
    scaled: Arrays = dict(upload)
    for name in _common(upload, model, parameters):
        new, old = upload[name].reshape(-1), model[name].reshape(-1)
        result = np.empty_like(new)
        for start in range(0, len(new), BLOCK):
            part = slice(start, start + BLOCK)
            base = old[part].astype(np.float64)
            result[part] = base + factor * (new[part] - base)
        scaled[name] = result.reshape(upload[name].shape)
    return scaled


def _common(upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]) -> list[str]:
    """Return the parameters that were both sent and returned: a method may send less than it gets back."""
    return [name for name in parameters if name in upload and name in model]
