"""Control variates of the clients, kept by the server: what each client changed last, taken off its next change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.method import Upload
from fedcross.strategies.pool.pool import Array, Arrays, Layout

DECAY = 0.8
"""What the products of a round still count for in the next one."""
AGE = 10
"""A client is forgotten once this many times as many uploads came after its own as clients are known."""
MIB = 1 << 20


class ControlVariates:
    """The last change y_c of each client c, which the server knows, and the share of it that the next change repeats.

    A client's change ``d = v - w``, from the model w that it got to its upload v, has a part that it makes in every
    visit, because its data differ from the others'. With the mean change ``Y`` of all clients known, and for each
    trained entry of the ``state_dict`` the share

        s = sum_t DECAY^(now - t) <d - Y, y_c - Y>  /  sum_t DECAY^(now - t) |y_c - Y|^2,   kept in [0, 1]

    over the uploads of known clients in rounds t, this one included, :meth:`correct` returns ``v - s b (y_c - Y)``,
    ``b = min(1, |d - Y| / |y_c - Y|)``: what is taken off is never longer than how the change differs now, so one visit
    out of measure does no harm in the next one. s is the coefficient of a control variate that leaves the least
    variance. With s = b = 1 it is the rule of SAGA (Defazio et al., NeurIPS 2014) and, for clients, of FedVARP
    (Jhunjhunwala et al., UAI 2022), which average the corrected changes of one model. The first upload of a client
    stays as it is.

    Only parameters are corrected. `limit` is the bytes for the changes, (p,) values each; the client heard least
    recently is forgotten first, and 0 keeps none. Y stands for what all clients would change. A client that has stopped
    coming is therefore forgotten: with N clients and K uploads a round after ``AGE N / K`` rounds.
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self.entries = sorted((e for e in layout.entries if e.is_parameter), key=lambda entry: entry.start)
        self.dtype = layout.dtype
        self.most = places(limit, layout.parameter_size * layout.dtype.itemsize)
        #: Client -> y_c (p,), the client heard last at the end; and the number of its upload.
        self.rows: dict[int, Array] = {}
        self.heard: dict[int, int] = {}
        self.uploads = 0
        #: The sums above and below the fraction of s, for each of the E entries.
        self.products = np.zeros((2, len(self.entries)))

    @property
    def share(self) -> NDArray[np.float64]:
        """The share s of each entry, float64 (E,)."""
        above, below = self.products
        return np.clip(np.divide(above, below, out=np.zeros_like(above), where=below > 0), 0.0, 1.0)

    def recalled(self) -> float:
        """Return the mean of s over the entries, weighted by how much the clients' changes differ in them."""
        weights = self.products[1]
        return float(self.share @ weights / weights.sum()) if weights.sum() > 0 else 0.0

    def correct(self, uploads: Sequence[Upload], sent: Callable[[int], Arrays]) -> list[Upload]:
        """Return the uploads without what their clients were going to change anyway, and remember what they changed.

        The `uploads` are of one round, one for a client at most, and are not changed; ``sent(slot)`` is the model that
        a client got.
        """
        if not self.most or not uploads:
            return list(uploads)
        for client in [c for c in self.rows if self.heard[c] < self.uploads - AGE * len(self.rows)]:
            self._forget(client)
        total = sum(self.rows.values(), np.zeros(1))  # in float64
        average = (total / max(1, len(self.rows))).astype(self.dtype)
        changes = [self._row(upload.arrays) - self._row(sent(upload.slot)) for upload in uploads]
        known = [self.rows.get(upload.client) for upload in uploads]
        measured = [
            None if then is None else self._products(now - average, then - average) for now, then in zip(changes, known)
        ]
        self.products *= DECAY
        for found in measured:
            if found is not None:
                self.products += found[:2]
        corrected = []
        for upload, change, then, found in zip(uploads, changes, known, measured):
            if then is not None and found is not None:
                share = (self.share * bound(found)).astype(self.dtype)
                shift = [(average - then)[part] * one for part, one in zip(self._parts(), share)]
                new = {e.name: upload.arrays[e.name] + one.reshape(e.shape) for e, one in zip(self.entries, shift)}
                upload = replace(upload, arrays={**upload.arrays, **new})
            corrected.append(upload)
            self.rows.pop(upload.client, None)  # so that it comes last
            self.rows[upload.client], self.heard[upload.client] = change, self.uploads
            self.uploads += 1
        while len(self.rows) > self.most:
            self._forget(next(iter(self.rows)))
        return corrected

    def _parts(self) -> Iterator[slice]:
        return (slice(entry.start, entry.stop) for entry in self.entries)

    def _row(self, arrays: Arrays) -> Array:
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in self.entries])

    def _products(self, now: Array, then: Array) -> NDArray[np.float64]:
        """Return ``<now, then>``, ``|then|^2`` and ``|now|^2`` of each entry, float64 (3, E)."""
        pairs = ((now, then), (then, then), (now, now))
        return np.array([[product(one[part], other[part]) for part in self._parts()] for one, other in pairs])

    def _forget(self, client: int) -> None:
        del self.rows[client], self.heard[client]

    def state(self) -> Arrays:
        """Return the changes in the order in which the clients were heard, and the products behind s."""
        if not self.rows:
            return {}
        return {
            "clients": np.array(list(self.rows), np.int64),
            "heard": np.array([*(self.heard[client] for client in self.rows), self.uploads], np.int64),
            "rows": np.stack(list(self.rows.values())),
            "products": self.products,
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load what :meth:`state` returned."""
        if "rows" in arrays:
            clients = arrays["clients"].tolist()
            *heard, self.uploads = arrays["heard"].tolist()
            self.rows, self.heard = dict(zip(clients, arrays["rows"])), dict(zip(clients, heard))
            self.products = arrays["products"].copy()


def places(limit: int, nbytes: int) -> int:
    """Return how many clients' changes of `nbytes` go into `limit` bytes; 0 for one, which is its own mean."""
    found = limit // max(1, nbytes)
    return found if found > 1 else 0


def bound(measured: NDArray[np.float64]) -> float:
    """Return b, 1 or less, from the products of one upload (d - Y and y - Y, 3, E): ``<,>, |y - Y|^2, |d - Y|^2``."""
    _, then, now = measured.sum(axis=1)
    return math.sqrt(now / then) if now < then else 1.0


def product(one: Array, other: Array) -> float:
    """Return the inner product of two arrays (p,), summed in float64, the same for any number of threads."""
    return float(np.einsum("i,i->", one, other, dtype=np.float64))
