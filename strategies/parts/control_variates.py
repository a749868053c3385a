"""Control variates of the clients, kept by the server: what each client changed last, taken off its next change."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.method import Upload
from fedcross.strategies.pool.pool import Array, Arrays, Layout

DECAY = 0.8  # What the products of a round still count for in the next one.
AGE = 10  # A client is forgotten once this many times as many uploads came after its own as clients are known.
MIB = 1 << 20


class ControlVariates:
    """The last change y_c of each client c, which the server knows, and the share of it that the next change repeats.

    A client's change ``d = v - w``, from the model w that it got to its upload v, has a part that it makes in every
    visit, because its data differ from the others'. With the mean change ``Y`` of all clients known, and for each
    trained entry of the ``state_dict`` the share

        s = sum_t DECAY^(now - t) <d - Y, y_c - Y>  /  sum_t DECAY^(now - t) |y_c - Y|^2,   kept in [0, 1]

    over the uploads of known clients in rounds t, this one included, :meth:`correct` returns ``v - s b (y_c - Y)``, ``b
    = min(1, |d - Y| / |y_c - Y|)``. s leaves the least variance. With s = b = 1 it is the rule of SAGA (Defazio et al.,
    NeurIPS 2014) and, for clients, of FedVARP. The first upload of a client, and all buffers, stay as they are.

    `limit` is the bytes for the changes, (p,) values each; the client heard least recently is forgotten first, and 0
    keeps none. With N clients and K uploads a round a client that stays away is forgotten after ``AGE N / K`` rounds.
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self.entries = sorted((e for e in layout.entries if e.is_parameter), key=lambda entry: entry.place.start)
        self.dtype = layout.dtype
        self.most = capacity(limit, layout.parameter_size * layout.dtype.itemsize)
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
        """Return a round's uploads corrected, and remember what changed; ``sent(slot)`` is a client's model."""
        if not self.most or not uploads:
            return list(uploads)
        self._forget([c for c in self.rows if self.heard[c] < self.uploads - AGE * len(self.rows)])
        total = sum(self.rows.values(), np.zeros(1))  # in float64
        average = (total / max(1, len(self.rows))).astype(self.dtype)
        changes = {upload.client: self._row(upload.arrays) - self._row(sent(upload.slot)) for upload in uploads}
        apart = {client: self.rows[client] - average for client in changes if client in self.rows}
        found = {client: self._products(changes[client] - average, then) for client, then in apart.items()}
        self.products = sum((one[:2] for one in found.values()), self.products * DECAY)
        corrected = [self._corrected(u, apart[u.client], found[u.client]) if u.client in apart else u for u in uploads]
        for client, change in changes.items():
            self.rows.pop(client, None)  # so that it comes last
            self.rows[client], self.heard[client] = change, self.uploads
            self.uploads += 1
        self._forget(list(self.rows)[: max(0, len(self.rows) - self.most)])
        return corrected

    def _corrected(self, upload: Upload, apart: Array, products: NDArray[np.float64]) -> Upload:
        """Return `upload` without ``s b (y_c - Y)``, `apart` being ``y_c - Y`` (p,)."""
        _, then, now = products.sum(axis=1)
        share = (self.share * (math.sqrt(now / then) if now < then else 1.0)).astype(self.dtype)
        arrays = dict(upload.arrays)
        for entry, one in zip(self.entries, share):
            arrays[entry.name] = arrays[entry.name] - (apart[entry.place] * one).reshape(entry.shape)
        return replace(upload, arrays=arrays)

    def _row(self, arrays: Arrays) -> Array:
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in self.entries])

    def _products(self, now: Array, then: Array) -> NDArray[np.float64]:
        """Return ``<now, then>``, ``|then|^2`` and ``|now|^2`` of each entry, float64 (3, E)."""
        pairs, parts = ((now, then), (then, then), (now, now)), [entry.place for entry in self.entries]
        return np.array([[np.einsum("i,i->", a[p], b[p], dtype=np.float64) for p in parts] for a, b in pairs])

    def _forget(self, clients: list[int]) -> None:
        for client in clients:
            del self.rows[client], self.heard[client]

    def state(self) -> dict[str, Any]:
        """Return the changes, when each client was heard, and the products behind s."""
        if not self.rows:
            return {}
        own = {"rows": dict(self.rows), "heard": dict(self.heard)}
        return {**own, "uploads": self.uploads, "products": self.products.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def capacity(limit: int, nbytes: int) -> int:
    """Return how many clients' changes of `nbytes` go into `limit` bytes; 0 for one, which is its own mean."""
    found = limit // max(1, nbytes)
    return found if found > 1 else 0
