"""Control variates of the clients, kept by the server: what each client changed last, taken off its next change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.pool.layout import Array, Arrays, Layout
from fedcross.strategies.wire.protocol import Upload

DECAY = 0.8
"""What the products of a round still count for in the next one."""
AGE = 10
"""A client is forgotten once this many times as many uploads came after its own as clients are known."""
LARGE = 1e6
"""The sum of all changes is added up anew without a change that was so many times as long as it."""
MIB = 1 << 20


class ControlVariates:
    """The last change y_c of each client c, which the server knows, and the share of it that the next change repeats.

    A client's change ``d = v - w``, from the model w that it got to its upload v, has a part that it makes in every
    visit, because its data differ from the others'. With the mean change ``Y`` of all clients known, and for each
    trained entry of the ``state_dict`` the share

        s = sum_t DECAY^(now - t) <d - Y, y_c - Y>  /  sum_t DECAY^(now - t) |y_c - Y|^2,   kept in [0, 1]

    over the uploads of known clients in rounds t, this one included, :meth:`correct` returns ``v - s (y_c - Y)``. s is
    the coefficient of a control variate that leaves the least variance. With s = 1 it is the rule of SAGA (Defazio et
    al., NeurIPS 2014) and, for clients, of FedVARP (Jhunjhunwala et al., UAI 2022), which average the corrected
    changes of one model. The first upload of a client stays as it is.

    Parameters
    ----------
    layout : Layout
        Of the models; only its parameters are corrected.
    limit : int
        Bytes for the changes, (p,) values each; the client heard least recently is forgotten first. 0 keeps none.

    Notes
    -----
    Y stands for what all clients would change. A client that has stopped coming is therefore forgotten, after ``AGE``
    times as many uploads as there are clients: with N clients and K uploads a round after ``AGE N / K`` rounds.
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self.entries = [entry for entry in layout.entries if entry.is_parameter]
        self.size, self.dtype = layout.parameter_size, layout.dtype
        self.most = limit // max(1, self.size * layout.dtype.itemsize)
        self.rows: dict[int, Array] = {}
        self.heard: dict[int, int] = {}
        self.uploads = 0
        self.total = np.zeros(self.size if self.most else 0)
        self.products = np.zeros((2, len(self.entries)))

    @property
    def share(self) -> NDArray[np.float64]:
        """The share s of each entry, float64 (E,)."""
        above, below = self.products
        return np.clip(np.divide(above, below, out=np.zeros_like(above), where=below > 0), 0.0, 1.0)

    def correct(self, uploads: Sequence[Upload], sent: Callable[[int], Arrays]) -> list[Upload]:
        """Return the uploads without what their clients were going to change anyway, and remember what they changed.

        Parameters
        ----------
        uploads : sequence of Upload
            Of one round, one for a client at most; not changed.
        sent : callable
            Slot -> the model that its client got, with arrays of the upload's names and shapes.
        """
        if not self.most:
            return list(uploads)
        self._forget_the_gone()
        average = (self.total / max(1, len(self.rows))).astype(self.dtype)
        changes = [self._change(upload, sent(upload.slot)) for upload in uploads]
        self.products *= DECAY
        for upload, change in zip(uploads, changes):
            if upload.client in self.rows:
                self._compare(change - average, self.rows[upload.client] - average)
        shares = self.share.astype(self.dtype)
        corrected = [self._corrected(upload, average, shares) for upload in uploads]
        for upload, change in zip(uploads, changes):
            self._remember(upload.client, change)
        return corrected

    def recalled(self) -> float:
        """Return the mean of s over the entries, weighted by how much the clients' changes differ in them."""
        weights = self.products[1]
        return float(self.share @ weights / weights.sum()) if weights.sum() > 0 else 0.0

    def _change(self, upload: Upload, model: Arrays) -> Array:
        change = np.empty(self.size, self.dtype)
        for entry in self.entries:
            part = change[entry.start : entry.stop].reshape(entry.shape)
            np.subtract(upload.arrays[entry.name], model[entry.name], out=part)
        return change

    def _compare(self, change: Array, known: Array) -> None:
        for number, entry in enumerate(self.entries):
            now, then = change[entry.start : entry.stop], known[entry.start : entry.stop]
            self.products[0, number] += product(now, then)
            self.products[1, number] += product(then, then)

    def _corrected(self, upload: Upload, average: Array, shares: Array) -> Upload:
        if upload.client not in self.rows:
            return upload
        arrays, known = dict(upload.arrays), self.rows[upload.client]
        for share, entry in zip(shares, self.entries):
            part = slice(entry.start, entry.stop)
            change = share * (average[part] - known[part])
            arrays[entry.name] = upload.arrays[entry.name] + change.reshape(entry.shape)
        return replace(upload, arrays=arrays)

    def _remember(self, client: int, change: Array) -> None:
        if client in self.rows:
            self._forget(client)
        self.rows[client], self.heard[client] = change, self.uploads
        self.total += change
        self.uploads += 1
        while len(self.rows) > self.most:
            self._forget(next(iter(self.rows)))

    def _forget_the_gone(self) -> None:
        oldest = self.uploads - AGE * len(self.rows)
        for client in [client for client in self.rows if self.heard[client] < oldest]:
            self._forget(client)

    def _forget(self, client: int) -> None:
        gone = self.rows.pop(client).astype(np.float64)
        del self.heard[client]
        self.total -= gone
        if product(gone, gone) > LARGE**2 * product(self.total, self.total):
            self.total = np.sum(list(self.rows.values()), axis=0, dtype=np.float64) if self.rows else 0 * gone

    def state(self) -> Arrays:
        """Return the changes in the order in which the clients were heard, their sum, and the products behind s."""
        if not self.rows:
            return {}
        return {
            "variates.clients": np.array(list(self.rows), np.int64),
            "variates.heard": np.array([*self.heard.values(), self.uploads], np.int64),
            "variates.rows": np.stack(list(self.rows.values())),
            "variates.total": self.total,
            "variates.products": self.products,
        }

    def restore(self, arrays: Arrays) -> None:
        """Load what :meth:`state` returned, from among all arrays of a checkpoint."""
        if "variates.rows" in arrays:
            clients = arrays["variates.clients"].tolist()
            *heard, self.uploads = arrays["variates.heard"].tolist()
            self.rows = {client: row.copy() for client, row in zip(clients, arrays["variates.rows"])}
            self.heard = dict(zip(clients, heard))
            self.total = arrays["variates.total"].copy()
            self.products = arrays["variates.products"].copy()


def product(one: Array, other: Array) -> float:
    """Return the inner product of two arrays (p,), summed in float64, the same for any number of threads."""
    return float(np.einsum("i,i->", one, other, dtype=np.float64))
