"""Defence against well-formed but poisoned uploads: norms are bounded by multiples of the exchange's median.

With an upload's update u, the change of its trained weights, and M the median of the exchange's update norms, an
upload with ``|u| > quarantine M`` is lost, and another with ``|u| > clip M`` becomes ``sent + u clip M / |u|``. The
float arrays of each extra group are bounded by ``quarantine`` times the group's median norm in the same way. A number
of examples counts as at most ``weight`` times the median. A test of directions flags 15 % of skewed honest clients.

An exchange of fewer than three uploads is judged by the norms of recent exchanges too; of the first two, none is lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.filters.base import Filter, Verdict
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.parts.averaging import squared_distance
from fedcross.strategies.pool.pool import Array, Arrays
from fedcross.strategies.wire.records import Payload

JUDGED = 3  # uploads that a median can judge
KEPT = 20  # norms of earlier uploads, for exchanges of fewer


class Defence(Settings):
    """Settings of the defence: whether uploads are judged, and the multiples of an exchange's medians.

    An upload beyond `quarantine` is lost, an update longer than `clip` shortened; `weight` is that of examples.
    """

    enabled: bool = False
    quarantine: float = Field(3.0, ge=1)
    clip: float = Field(1.0, gt=0)
    weight: float = Field(3.0, ge=1)


class DefenceFilter(Filter):
    """Judges the uploads of an exchange; models pass through unchanged.

    ``state`` are the update norms of the last accepted uploads, the latest last.
    """

    def __init__(self, settings: Defence, start: Start) -> None:
        self.settings, self.parameters = settings, start.parameters
        self.state: list[float] = []

    def judge(self, round: Round, uploads: list[Upload], payloads: Mapping[int, Payload]) -> Verdict:
        """Return the uploads that count, shortened where they are too long."""
        norms = {u.slot: norm(u.arrays, payloads[u.slot].received, self.parameters) for u in uploads}
        known = [value for value in norms.values() if math.isfinite(value)]
        known = known if len(known) >= JUDGED else self.state + known
        median = _median(known)
        limit, longest = self._limit(known), self.settings.clip * median
        verdict, clipped = Verdict([]), 0
        for upload in uploads:
            value = norms[upload.slot]
            if not (value <= limit and math.isfinite(value)):
                verdict.refused.append((upload, "quarantined", f"update norm {value:.4g}, limit {limit:.4g}"))
                continue
            if value > longest:
                sent = payloads[upload.slot].received
                upload = replace(upload, arrays=scaled(upload.arrays, sent, self.parameters, longest / value))
                clipped += 1
            verdict.uploads.append(upload)
        self.state = [*self.state, *(min(norms[u.slot], 3 * median) for u in verdict.uploads)][-KEPT:]
        bounded, lightened = self._extras(verdict.uploads), self._examples(verdict.uploads)
        verdict.counts = {"clipped": float(clipped), "lightened": float(lightened), "extras_bounded": float(bounded)}
        return verdict

    def _limit(self, norms: list[float]) -> float:
        return self.settings.quarantine * _median(norms) if len(norms) >= JUDGED else math.inf

    def _extras(self, uploads: list[Upload]) -> int:
        """Shorten the float arrays of extra groups in place of the list's elements; return how many uploads changed."""
        changed = set()
        for group in sorted({name for upload in uploads for name in upload.extras}):
            own = [norm(upload.extras[group], {}, upload.extras[group]) for upload in uploads]
            limit = self._limit(own)
            for i in [i for i, value in enumerate(own) if value > limit]:
                arrays = uploads[i].extras[group]
                shorter = scaled(arrays, {}, arrays, limit / own[i])
                uploads[i] = replace(uploads[i], extras={**uploads[i].extras, group: shorter})
                changed.add(i)
        return len(changed)

    def _examples(self, uploads: list[Upload]) -> int:
        """Cap the numbers of examples of the list's elements; return how many were capped."""
        limit = max(1, int(self.settings.weight * _median([float(upload.num_examples) for upload in uploads])))
        heavy = sum(upload.num_examples > limit for upload in uploads)
        uploads[:] = [replace(upload, num_examples=min(upload.num_examples, limit)) for upload in uploads]
        return heavy


def _median(values: list[float]) -> float:
    """Return the median, of an even number the lower middle one: one false value cannot raise it; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def norm(arrays: Arrays, base: Mapping[str, Array], names: Collection[str]) -> float:
    """Return the Euclidean norm of ``arrays - base`` over the float entries in `names`, summed in float64."""
    return math.sqrt(squared_distance(arrays, base, _floats(arrays, names)))


def scaled(arrays: Arrays, base: Mapping[str, Array], names: Collection[str], share: float) -> Arrays:
    """Return ``base + share (arrays - base)`` for the float entries in `names`; a missing base is 0."""
    found = dict(arrays)
    for name in _floats(arrays, names):
        old = base.get(name, np.zeros_like(arrays[name]))
        found[name] = (old + share * (arrays[name].astype(np.float64) - old)).astype(arrays[name].dtype)
    return found


def _floats(arrays: Arrays, names: Collection[str]) -> list[str]:
    return [name for name in names if name in arrays and arrays[name].dtype.kind == "f"]
