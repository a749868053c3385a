"""The defence of one run: judges its exchanges one after the other, and remembers what was usual in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcross.strategies.round.buffers import bound, without_variances_below_zero
from fedcross.strategies.round.defence import JUDGED, Defence, defend

if TYPE_CHECKING:
    from fedcross.strategies.pool.layout import Array
    from fedcross.strategies.wire.protocol import Upload


@dataclass(frozen=True)
class Verdict:
    """What the defence says of one exchange.

    Attributes
    ----------
    uploads : list of Upload
        Those that are accepted, shortened where necessary.
    quarantined : list of tuple
        (upload, what was measured, its value, the limit) of the others.
    clipped, lightened, bounded : int
        Number of `uploads` whose update was shortened, whose number of examples was lowered, and of whose other
        entries one was shortened.
    """

    uploads: list[Upload]
    quarantined: list[tuple[Upload, str, float, float]]
    clipped: int
    lightened: int
    bounded: int


class Defender:
    """Judges uploads by those of their exchange or, where these are few, by what was usual before.

    Parameters
    ----------
    rules : Defence
        The multiples.
    unusual : float
        The method's own multiple: an update is quarantined beyond the larger one of both.
    asked : int
        Clients that a round asks.
    """

    def __init__(self, rules: Defence, unusual: float, asked: int) -> None:
        self._rules, self._asked = rules, asked
        self._wide = rules.model_copy(update={"quarantine": max(rules.quarantine, unusual)})
        #: Exchange of a round -> usual length of an update in the last one that had enough uploads.
        self.usual: dict[int, float] = {}
        #: The same of entries that are not trained: exchange -> entry -> usual change.
        self.buffers: dict[int, dict[str, float]] = {}

    def can_judge(self, exchange: int, uploads: int) -> bool:
        """Return whether so many uploads can be judged: a lone one has nothing to be compared with at first."""
        return exchange in self.usual or uploads >= min(2, self._asked)

    def judge(
        self,
        exchange: int,
        uploads: Sequence[Upload],
        sent: Sequence[Mapping[str, Array]],
        parameters: Collection[str],
        others: Collection[str],
        values: int | None,
    ) -> Verdict:
        """Judge the uploads of an exchange, and remember what is usual in it.

        Parameters
        ----------
        exchange : int
            Its number in the round, from 0.
        uploads : sequence of Upload
            Those that the guard accepted.
        sent : sequence of mapping
            The model that the server sent for each upload, in the same order.
        parameters, others : collection of str
            Names of the trained entries and of all others.
        values : int or None
            Number of trained values of the full model, if models are slices of it.
        """
        models = {upload.slot: model for upload, model in zip(uploads, sent, strict=True)}
        sound = without_variances_below_zero(uploads, sent)
        models_of = [models[upload.slot] for upload in sound.uploads]
        known, lone = self.usual.get(exchange, 0.0), self._asked < JUDGED
        found = defend(self._wide, sound.uploads, models_of, parameters, values, known, lone)
        if 0 < found.usual < math.inf:
            self.usual[exchange] = found.usual
        models_of = [models[upload.slot] for upload in found.uploads]
        before = self.buffers.get(exchange, {})
        kept, usual = bound(found.uploads, models_of, others, self._rules.quarantine, before)
        self.buffers[exchange] = before | usual
        lost = [(upload, "lowest variance", value, limit) for upload, value, limit in sound.quarantined]
        lost += [(upload, "update norm", norm, limit) for upload, norm, limit in found.quarantined]
        return Verdict(kept.uploads, lost, found.clipped, found.lightened, kept.clipped)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, plain; nothing if nothing is usual yet."""
        told: dict[str, Any] = {}
        if self.usual:
            told["_usual"] = {str(exchange): length for exchange, length in self.usual.items()}
        if any(self.buffers.values()):
            told["_usual_buffers"] = {str(exchange): changes for exchange, changes in self.buffers.items()}
        return told

    def restore(self, values: dict[str, Any], exchanges: int) -> None:
        """Take what :meth:`state` told out of `values`; an earlier version told one length for all exchanges."""
        told = values.pop("_usual", {})
        if not isinstance(told, Mapping):
            told = dict.fromkeys(range(exchanges), told)
        self.usual = {int(exchange): float(length) for exchange, length in told.items()}
        self.buffers = {int(exchange): dict(found) for exchange, found in values.pop("_usual_buffers", {}).items()}
