"""Control variates of the clients, kept by the server: what each client changed last, taken off its next change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.method import Upload
from fedcross.strategies.pool.loops import over_blocks
from fedcross.strategies.pool.pool import Array, Arrays, Entry, Layout

DECAY = 0.8
"""What the products of a round still count for in the next one."""
AGE = 10
"""A client is forgotten once this many times as many uploads came after its own as clients are known."""
LARGE = 1e6
"""The sum of all changes is added up anew when a change goes that was so many times as long as all others."""
ROWS = 8
"""Rows of a block's columns that are in use at the same time."""
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
        self.most = places(limit, self.size * layout.dtype.itemsize)
        self.rows: dict[int, Array] = {}
        self.heard: dict[int, int] = {}
        self.lengths: dict[int, float] = {}
        self.uploads = 0
        self.total = np.zeros(self.size if self.most else 0)
        self._scratch = np.empty((0, 0), layout.dtype)
        self.products = np.zeros((2, len(self.entries)))

    @property
    def share(self) -> NDArray[np.float64]:
        """The share s of each entry, float64 (E,)."""
        above, below = self.products
        return np.clip(np.divide(above, below, out=np.zeros_like(above), where=below > 0), 0.0, 1.0)

    def correct(self, uploads: Sequence[Upload], sent: Callable[[int], Arrays]) -> list[Upload]:
        """Return the uploads without what their clients were going to change anyway, and remember what they changed.

        The arrays of what is returned are good until the next call.

        Parameters
        ----------
        uploads : sequence of Upload
            Of one round, one for a client at most; not changed.
        sent : callable
            Slot -> the model that its client got, with arrays of the upload's names and shapes.
        """
        if not self.most or not uploads:
            return list(uploads)
        self._forget_the_gone()
        models = [sent(upload.slot) for upload in uploads]
        known = [self.rows.get(upload.client) for upload in uploads]
        average = np.empty(self.size, self.dtype)
        if len(self._scratch) < len(uploads):
            self._scratch = np.empty((len(uploads), self.size), self.dtype)
        changes = corrected = self._scratch  # each change gives its place to the corrected model, block by block
        found: dict[int, NDArray[np.float64]] = {}

        def measure(number: int, block: slice) -> None:
            part = found[number] = np.zeros((len(uploads), 4, len(self.entries)))
            average[block] = self.total[block] / max(1, len(self.rows))
            for i, (upload, model, row) in enumerate(zip(uploads, models, known)):
                for which, entry, place in self._pieces(block):
                    change, mean = changes[i, place], average[place]
                    np.subtract(values(upload.arrays, entry, place), values(model, entry, place), out=change)
                    part[i, 3, which] = product(change, change)
                    if row is not None:
                        now, then = change - mean, row[place] - mean
                        part[i, :3, which] = product(now, then), product(then, then), product(now, now)

        blocks = over_blocks(measure, ROWS, self.dtype.itemsize, 0, self.size)
        products = np.sum([found[number] for number in range(blocks)], axis=0)
        self.products *= DECAY
        for measured in products:
            self.products += measured[:2]
        shares = [(self.share * bound(measured)).astype(self.dtype) for measured in products]

        def correct(_: int, block: slice) -> None:
            for i, (upload, row) in enumerate(zip(uploads, known)):
                if row is None:
                    self.total[block] += changes[i, block]
                    continue
                self.total[block] -= row[block]
                self.total[block] += changes[i, block]
                shift = average[block] - row[block]
                row[block] = changes[i, block]
                for which, entry, place in self._pieces(block):
                    part = shift[place.start - block.start : place.stop - block.start]
                    part *= shares[i][which]
                    np.add(values(upload.arrays, entry, place), part, out=corrected[i, place])

        over_blocks(correct, ROWS, self.dtype.itemsize, 0, self.size)
        for upload, change, measured in zip(uploads, changes, products):
            before = self.lengths.get(upload.client, 0.0)
            row = self.rows.pop(upload.client, None)  # so that it comes last
            self.rows[upload.client] = change.copy() if row is None else row
            self.lengths[upload.client] = float(measured[3].sum())
            self.heard[upload.client] = self.uploads
            self.uploads += 1
            self._without(before)
        while len(self.rows) > self.most:
            self._forget(next(iter(self.rows)))
        return [
            upload if row is None else replace(upload, arrays={**upload.arrays, **self._views(new)})
            for upload, row, new in zip(uploads, known, corrected)
        ]

    def recalled(self) -> float:
        """Return the mean of s over the entries, weighted by how much the clients' changes differ in them."""
        weights = self.products[1]
        return float(self.share @ weights / weights.sum()) if weights.sum() > 0 else 0.0

    def _pieces(self, block: slice) -> Iterator[tuple[int, Entry, slice]]:
        """Yield number, entry and columns of each part of an entry in `block`."""
        for which, entry in enumerate(self.entries):
            if entry.start < block.stop and block.start < entry.stop:
                yield which, entry, slice(max(entry.start, block.start), min(entry.stop, block.stop))

    def _views(self, row: Array) -> Arrays:
        return {entry.name: row[entry.start : entry.stop].reshape(entry.shape) for entry in self.entries}

    def _forget_the_gone(self) -> None:
        oldest = self.uploads - AGE * len(self.rows)
        for client in [client for client in self.rows if self.heard[client] < oldest]:
            self._forget(client)

    def _forget(self, client: int) -> None:
        self.total -= self.rows.pop(client)
        del self.heard[client]
        self._without(self.lengths.pop(client))

    def _without(self, length: float) -> None:
        """Add the sum up anew if what went, of squared `length`, may have swallowed the rest's digits."""
        if length > LARGE**2 * max(self.lengths.values(), default=0.0):
            self.total[...] = np.sum(list(self.rows.values()), axis=0, dtype=np.float64) if self.rows else 0.0

    def state(self) -> Arrays:
        """Return the changes in the order in which the clients were heard, their sum, and the products behind s."""
        if not self.rows:
            return {}
        return {
            "clients": np.array(list(self.rows), np.int64),
            "heard": np.array([*(self.heard[client] for client in self.rows), self.uploads], np.int64),
            "rows": np.stack(list(self.rows.values())),
            "total": self.total,
            "products": self.products,
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load what :meth:`state` returned."""
        if "rows" in arrays:
            clients = arrays["clients"].tolist()
            *heard, self.uploads = arrays["heard"].tolist()
            self.rows = {client: row.copy() for client, row in zip(clients, arrays["rows"])}
            self.heard = dict(zip(clients, heard))
            self.lengths = {client: product(row, row) for client, row in self.rows.items()}
            self.total = arrays["total"].copy()
            self.products = arrays["products"].copy()


def places(limit: int, nbytes: int) -> int:
    """Return how many clients' changes of `nbytes` go into `limit` bytes; 0 for one, which is its own mean."""
    found = limit // max(1, nbytes)
    return found if found > 1 else 0


def bound(measured: NDArray[np.float64]) -> float:
    """Return b, 1 or less, from the products of one upload (d - Y and y - Y, ..., E): ``<,>, |y - Y|^2, |d - Y|^2``."""
    _, then, now = measured[:3].sum(axis=1)
    return math.sqrt(now / then) if now < then else 1.0


def values(arrays: Arrays, entry: Entry, columns: slice) -> Array:
    """Return the values (n,) of `entry` that lie in `columns` of a row."""
    return arrays[entry.name].reshape(-1)[columns.start - entry.start : columns.stop - entry.start]


def product(one: Array, other: Array) -> float:
    """Return the inner product of two arrays (p,), summed in float64, the same for any number of threads."""
    return float(np.einsum("i,i->", one, other, dtype=np.float64))
