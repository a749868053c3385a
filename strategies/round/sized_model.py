"""Base of methods with one global model of which every client trains the slice that its device can hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from logging import WARNING

import numpy as np
from flwr.common.logger import log
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.pool.layout import Array
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.models.slicing.plan import Size

S = TypeVar("S", bound=Settings, default=Settings)


class SizedModel(Method[S]):
    """Base of methods with one global model and slices of it.

    A method defines which sizes there are and which of them each client gets. The new value of each weight is the mean
    of the uploads that have it; weights that no upload has stay as they are. Statistics of batch normalisation and
    counters belong to a size and are averaged among its uploads only.
    """

    interchangeable = True

    @property
    @abstractmethod
    def sizes(self) -> Sequence[Size]:
        """The sizes, the largest first."""

    @abstractmethod
    def size_for(self, slot: int, client: int) -> Size | None:
        """Return the size that `client` gets in `slot` of this round; None if its device can hold none."""

    @abstractmethod
    def weight(self, upload: Upload) -> float:
        """Return the weight of an upload in the mean."""

    def having(self, name: str, upload: Upload) -> Array | None:
        """Return which rows of the entry `name` count in this upload, bool (rows,); None for all."""
        return None

    def all_sizes(self) -> Sequence[Size]:
        """Return the sizes."""
        return self.sizes

    def budget_remarks(self) -> list[str]:
        """Return remarks on devices that can hold no model, and on widths that no device can hold."""
        found = super().budget_remarks()
        if not self.budgets or self.federation.networked:
            return found
        widest = max(self.budgets.values())
        if wide := sorted({size.width for size in self.sizes if not holds(widest, size)}, reverse=True):
            found.append(
                f"method.widths={wide}: no device can hold these, so a part of the global model is never trained, and "
                f"its accuracy is of that model. Raise a device's width; the widest is {widest:g} (devices.widths)."
            )
        return found

    def setup(self, arrays: Arrays) -> None:
        """Keep a copy of the initial model, and its statistics for every size."""
        self.model: Arrays = {n: a.copy() for n, a in arrays.items() if n in self.parameter_names}
        rest = {n: a for n, a in arrays.items() if n not in self.parameter_names}
        #: Size -> its buffers and counters.
        self.statistics = {size: {n: a.copy() for n, a in self._part(rest, size).items()} for size in self.sizes}
        self._slots: dict[int, Size] = {}

    def _part(self, arrays: Arrays, size: Size) -> Arrays:
        return self.sliced.corner(arrays, size) if size.width < 1 else arrays

    def largest(self, budget: float, among: Sequence[Size] | None = None) -> Size | None:
        """Return the first of these sizes (of all, if none are given) that a device of width `budget` can hold."""
        return next((size for size in among or self.sizes if holds(budget, size)), None)

    def slice_of(self, size: Size) -> Arrays:
        """Return the global model of `size`, in the order of the ``state_dict``."""
        values = {**self._part(self.model, size), **self.statistics[size]}
        return {name: values[name] for name in self.spec}

    def dispatch(self, current: Round) -> list[Payload]:
        """Send every client the slice that its device can hold; a device that can hold none is not asked."""
        found = {slot: self.size_for(slot, client) for slot, client in enumerate(current.clients)}
        self._slots = {slot: size for slot, size in found.items() if size is not None}
        if len(self._slots) < len(found):
            self._report.metrics["clients_without_a_model"] = float(len(found) - len(self._slots))
        if found and not self._slots:
            log(WARNING, "fedcross: round %s: nobody trains, since no drawn device can hold a model.", current.number)
        models = {size: self.slice_of(size) for size in set(self._slots.values())}
        places = {size: place for place, size in enumerate(self.sizes)}
        return [
            Payload(current.clients[slot], slot, models[size], config=described(size), stream=f"size{places[size]}")
            for slot, size in self._slots.items()
        ]

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the mean of the uploads, each weight over those that have it."""
        for name in self.model if uploads else ():
            self.model[name] = self._mean(name, uploads)
        for size in {self._slots[upload.slot] for upload in uploads}:
            own = [upload for upload in uploads if self._slots[upload.slot] == size]
            parts = [{n: upload.arrays[n] for n in self.statistics[size]} for upload in own]
            if parts[0]:
                self.statistics[size] = weighted_mean(parts, [self.weight(upload) for upload in own])
        return {}

    def _mean(self, name: str, uploads: list[Upload]) -> Array:
        """Return the new value of an entry: summed in float64, rounded once."""
        old = self.model[name]
        total, weights = np.zeros(old.shape), np.zeros(old.shape)
        for upload in uploads:
            size, weight = self._slots[upload.slot], self.weight(upload)
            part = self.sliced.index(name, size) if self.sliced.cuts(name, size) else ()
            values, rows = upload.arrays[name].astype(np.float64), self.having(name, upload)
            weigh = weight if rows is None else weight * rows.reshape(-1, *(1,) * (values.ndim - 1))
            total[part] += weigh * values
            weights[part] += weigh
        mean = np.divide(total, weights, out=old.astype(np.float64), where=weights > 0)
        return mean.astype(old.dtype)

    def slice_models(self) -> dict[Size, Arrays]:
        """Return the global model of every size."""
        return {size: self.slice_of(size) for size in self.sizes}

    def global_model(self) -> Arrays:
        """Return the global model of the largest size."""
        return self.slice_of(self.sizes[0])

    def state(self) -> State:
        """Return the global model, and the statistics of every size."""
        arrays = {f"model.{name}": array for name, array in self.model.items()}
        for size, own in self.statistics.items():
            arrays |= {f"statistics.{size.text}.{name}": array for name, array in own.items()}
        return State(arrays)

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        self.model = {name: state.arrays[f"model.{name}"] for name in self.model}
        self.statistics = {
            size: {name: state.arrays[f"statistics.{size.text}.{name}"] for name in own}
            for size, own in self.statistics.items()
        }
