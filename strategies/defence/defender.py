"""The defence of one run: judges its exchanges one after the other, and remembers what was usual in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fedcross.strategies.defence.bands import Bands
from fedcross.strategies.defence.buffers import bound, without_variances_below_zero
from fedcross.strategies.defence.rules import JUDGED, Defence, defend, lower_median

if TYPE_CHECKING:
    from fedcross.strategies.pool.layout import Array
    from fedcross.strategies.wire.protocol import Upload

K = TypeVar("K")

#: Medians beyond which an update of a slice is lost; up to that it is only shortened.
UNUSUAL_SLICE = 1e6
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
        #: The same of the bands of slices: exchange -> band -> median lengths of an update in it.
        self.bands: dict[int, dict[int, list[float]]] = {}

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
        bands: Bands | None,
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
        bands : Bands or None
            Those of the slices, if the method trains several sizes. Then a long update is shortened and not quarantined
            (up to :data:`UNUSUAL_SLICE` medians): of its size there may be few, whose updates are longer than others.
            After that a band that not all have is shortened to ``clip`` times what is usual in it.
        """
        models = {upload.slot: model for upload, model in zip(uploads, sent, strict=True)}
        sound = without_variances_below_zero(uploads, sent)
        models_of = [models[upload.slot] for upload in sound.uploads]
        known, lone = lower_median(self.usual.get(exchange, [0.0])), self._asked < JUDGED
        rules = self._wide
        if bands is not None:
            rules = rules.model_copy(update={"quarantine": max(rules.quarantine, UNUSUAL_SLICE)})
        found = defend(rules, sound.uploads, models_of, parameters, known, lone)
        if found.usual is not None and found.usual < math.inf:
            self.usual[exchange] = [*self.usual.get(exchange, []), found.usual][-REMEMBERED:]
        models_of, fair = [models[upload.slot] for upload in found.uploads], found.uploads
        if bands is not None:
            lengths = self.bands.setdefault(exchange, {})
            fair, medians = bands.shortened(fair, models_of, parameters, rules.clip, _middle(lengths))
            _remember(lengths, medians)
        changes = self.buffers.setdefault(exchange, {})
        kept, usual = bound(fair, models_of, parameters, others, self._rules.quarantine, _middle(changes))
        _remember(changes, usual)
        lost = [(upload, "lowest variance", value, limit) for upload, value, limit in sound.quarantined]
        lost += [(upload, "update norm", norm, limit) for upload, norm, limit in found.quarantined]
        whole = {upload.slot: upload.arrays for upload in sound.uploads}
        clipped = sum(upload.arrays is not whole[upload.slot] for upload in fair)
        return Verdict(kept.uploads, lost, clipped, found.lightened, kept.clipped)

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
        if any(self.bands.values()):
            told["_usual_bands"] = {
                str(exchange): {str(band): list(lengths) for band, lengths in memory.items()}
                for exchange, memory in self.bands.items()
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
        self.bands = {
            int(exchange): {int(band): _listed(lengths) for band, lengths in memory.items()}
            for exchange, memory in values.pop("_usual_bands", {}).items()
        }


def _middle(memory: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {key: lower_median(lengths) for key, lengths in memory.items()}


def _remember(memory: dict[K, list[float]], usual: Mapping[K, float]) -> None:
    for key, length in usual.items():
        memory[key] = [*memory.get(key, []), length][-REMEMBERED:]


def _listed(told: Sequence[float] | float) -> list[float]:
    return [float(told)] if isinstance(told, int | float) else [float(one) for one in told]
