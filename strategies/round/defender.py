"""The defence of one run: judges its exchanges one after the other, and remembers what was usual in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcross.strategies.round.buffers import bound, without_variances_below_zero
from fedcross.strategies.round.defence import JUDGED, Defence, defend, lower_median

if TYPE_CHECKING:
    from fedcross.strategies.pool.layout import Array
    from fedcross.strategies.wire.protocol import Upload

#: Exchanges that are remembered: of five, two in which the hostile were the majority do not decide what is usual.
REMEMBERED = 5


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
        #: Exchange of a round -> median lengths of an update in the last ones that had enough uploads.
        self.usual: dict[int, list[float]] = {}
        #: The same of entries that are not trained: exchange -> entry -> median changes.
        self.buffers: dict[int, dict[str, list[float]]] = {}

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
        known, lone = lower_median(self.usual.get(exchange, [0.0])), self._asked < JUDGED
        found = defend(self._wide, sound.uploads, models_of, parameters, values, known, lone)
        if found.usual is not None and found.usual < math.inf:
            self.usual[exchange] = [*self.usual.get(exchange, []), found.usual][-REMEMBERED:]
        models_of = [models[upload.slot] for upload in found.uploads]
        memory = self.buffers.setdefault(exchange, {})
        before = {name: lower_median(changes) for name, changes in memory.items()}
        kept, usual = bound(found.uploads, models_of, parameters, others, self._rules.quarantine, before)
        for name, change in usual.items():
            memory[name] = [*memory.get(name, []), change][-REMEMBERED:]
        lost = [(upload, "lowest variance", value, limit) for upload, value, limit in sound.quarantined]
        lost += [(upload, "update norm", norm, limit) for upload, norm, limit in found.quarantined]
        return Verdict(kept.uploads, lost, found.clipped, found.lightened, kept.clipped)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, plain; nothing if nothing is usual yet."""
        told: dict[str, Any] = {}
        if self.usual:
            told["_usual"] = {str(exchange): list(lengths) for exchange, lengths in self.usual.items()}
        if any(self.buffers.values()):
            told["_usual_buffers"] = {
                str(exchange): {name: list(changes) for name, changes in memory.items()}
                for exchange, memory in self.buffers.items()
            }
        return told

    def restore(self, values: dict[str, Any], exchanges: int) -> None:
        """Take what :meth:`state` told out of `values`; earlier versions told one number in place of a list."""
        told = values.pop("_usual", {})
        if not isinstance(told, Mapping):
            told = dict.fromkeys(range(exchanges), told)
        self.usual = {int(exchange): _listed(lengths) for exchange, lengths in told.items()}
        self.buffers = {
            int(exchange): {name: _listed(changes) for name, changes in memory.items()}
            for exchange, memory in values.pop("_usual_buffers", {}).items()
        }


def _listed(told: Sequence[float] | float) -> list[float]:
    return [float(told)] if isinstance(told, int | float) else [float(one) for one in told]
