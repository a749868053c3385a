"""K middleware models as one flat (K, d) buffer: similarity, mixing, mean and resizing at memory speed.

Row i of :attr:`Pool.rows` is model i in the order of its :class:`~strategies.pool.layout.Layout`. Uploads are written
directly into their row, models are read as views of it, and mixing is in place, so a pool takes the memory of K * d
values and no more. :mod:`strategies.pool.blocks` has the two passes that take most of the time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.errors import StorageError
from fedcross.core.settings import Settings
from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.layout import Array, Arrays, Layout
from fedcross.strategies.pool.mixing import Mixing

EXACT = 2**53  # float64 holds every integer up to this
ROUNDING = 1e-9  # a mixed counter within this relative distance of an integer counts as the integer


class Storage(Settings):
    """Where a pool is stored.

    Parameters
    ----------
    mmap_share : float
        A pool larger than this share of the machine's (or the container's) memory is kept in a memory-mapped file; with
        0 every pool is.
    folder : path, optional
        Folder of that file; None is the system's temporary folder. The file has no name and disappears with the pool or
        the process.
    """

    mmap_share: float = Field(default=0.5, ge=0)
    folder: Path | None = None


class Pool:
    """K models of one layout.

    Parameters
    ----------
    layout : Layout
        Layout of every model.
    k : int
        Number of models, 1 or more.
    storage : Storage, optional
        When and where to use a file instead of memory.

    Attributes
    ----------
    rows : float array (K, d)
        The models' float values, C-contiguous.
    integers : int64 array (K, i)
        Their integer entries.
    """

    def __init__(self, layout: Layout, k: int, storage: Storage | None = None) -> None:
        if k < 1:
            raise ValueError(f"a pool needs at least one model, not {k}")
        self.layout = layout
        self.storage = storage or Storage()
        self.rows: Array = self._allocate(k)
        self.integers: NDArray[np.int64] = np.zeros((k, layout.integer_size), np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def _allocate(self, k: int) -> Array:
        shape, dtype = (k, self.layout.size), self.layout.dtype
        size = k * self.layout.size * dtype.itemsize
        if size <= self.storage.mmap_share * memory_bytes():
            return np.empty(shape, dtype)
        folder = self.storage.folder
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
                return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
        except OSError as error:
            where = folder or "the temporary folder"
            raise StorageError(
                f"no room for a pool of {k} models, {size} bytes, in {where}: {error}. "
                "Free space there, name another folder or raise mmap_share."
            ) from error

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model a copy of `arrays`."""
        self.write(0, arrays)
        self.rows[1:] = self.rows[0]
        self.integers[1:] = self.integers[0]

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model into row i.

        Raises
        ------
        UploadError
            If it is not of this layout; the row is then unchanged.
        """
        self.layout.write(arrays, self.rows[i], self.integers[i])

    def model(self, i: int) -> Arrays:
        """Return model i as views of the pool (see :meth:`Layout.views`)."""
        return self.layout.views(self.rows[i], self.integers[i])

    def replace(self, slots: Sequence[int], members: Sequence[int]) -> None:
        """Make each of `slots` the uniform mean of `members`, computed as :meth:`mean` does."""
        if slots:
            self.rows[slots], self.integers[slots] = self._mean_rows(self._slots(members))

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the uniform mean of the models.

        Floats are summed in float64. The mean of integer entries is truncated, as a ``state_dict`` does when it
        stores it.

        Parameters
        ----------
        members : sequence of int, optional
            Slots to take the mean of; None is all.
        """
        row, integers = self._mean_rows(self._slots(members))
        return self.layout.views(row, integers)

    def mean_row(
        self, members: Sequence[int] | None = None, out: Array | None = None
    ) -> tuple[Array, NDArray[np.int64]]:
        """Return :meth:`mean` as one row of float values (d,), `out` if given, and a new one of integers (i,)."""
        return self._mean_rows(self._slots(members), out)

    def _mean_rows(self, slots: NDArray[np.int64], out: Array | None = None) -> tuple[Array, NDArray[np.int64]]:
        row = np.empty(self.layout.size, self.layout.dtype) if out is None else out
        blocks.mean(self.rows, slots, row)
        return row, self.mean_integers(slots)

    def mean_integers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the truncated mean (i,) of the integer entries of `slots`."""
        values = self.integers[slots]
        total = values.sum(axis=0)
        mean: NDArray[np.int64] = np.sign(total) * (np.abs(total) // len(slots))
        precise(mean[None], values, np.full((1, len(slots)), 1 / len(slots)))
        return mean

    def _slots(self, members: Sequence[int] | NDArray[np.int64] | None) -> NDArray[np.int64]:
        slots = np.arange(len(self)) if members is None else np.asarray(members, np.int64)
        if not len(slots):
            raise ValueError("no member of the pool was named; give at least one slot")
        return slots

    def gram(self, members: Sequence[int] | None = None, columns: slice | None = None) -> NDArray[np.float64]:
        """Return the inner products (m, m) of the members' rows in float64, from one pass over the pool.

        Parameters
        ----------
        members : sequence of int, optional
            The m slots; None is all.
        columns : slice, optional
            Columns of the rows, for example ``layout.columns("parameters")``; None is all.
        """
        return blocks.gram(self.rows, self._slots(members), columns or slice(None))

    def mix(self, mixing: Mixing) -> None:
        """Replace the pool by ``M @ pool``, in place and in column blocks.

        Rows that keep their model are not written, and a value that all models share stays exactly the same. Integer
        entries are mixed in float64 and truncated, as the public code does when it loads the mixture into an integer
        entry; a mixture within rounding error of an integer becomes that integer. See :func:`precise` for large ones.
        """
        self._mix(mixing, None)

    def mix_with_gram(self, mixing: Mixing, columns: slice | None = None) -> NDArray[np.float64]:
        """Do :meth:`mix` and return :meth:`gram` of all models before mixing, in the same pass over memory.

        For mixings that do not depend on a similarity, such as in-order selection: their diagnostics then cost little.
        Give the Gram matrix and the mixing to :func:`diagnostics`. `columns` are as in :meth:`gram` and must start at
        0, as those of ``layout.columns(...)`` do.
        """
        columns = columns or slice(None)
        gram = self._mix(mixing, columns)
        return self.gram(columns=columns) if gram is None else gram

    def _mix(self, mixing: Mixing, gram_columns: slice | None) -> NDArray[np.float64] | None:
        if len(mixing.rows) != len(self):
            raise ValueError(f"a mixing of {len(mixing.rows)} slots does not fit a pool of {len(self)}")
        targets = mixing.targets
        if not len(targets):
            return None
        index, weight = mixing.padded()
        gram = blocks.mix(self.rows, targets, index, weight, gram_columns)
        if self.integers.size:
            self._mix_integers(mixing.dense()[targets], targets)
        return gram

    def _mix_integers(self, weights: NDArray[np.float64], targets: NDArray[np.int64]) -> None:
        mixed = whole_numbers(weights @ self.integers.astype(np.float64))
        precise(mixed, self.integers, weights)
        self.integers[targets] = mixed

    def resize(self, k: int) -> None:
        """Change the number of models; the mean of the pool stays the same.

        Growing adds copies of the mean. Shrinking keeps the first k models and adds (old mean - their mean) to their
        parameters. Their float buffers are set to the old mean instead, because a shifted running variance could become
        negative. Integer entries of the remaining models do not change.
        """
        old = len(self)
        if k < 1:
            raise ValueError(f"a pool needs at least one model, not {k}")
        if k == old:
            return
        mean, integers = self._mean_rows(np.arange(old))
        keep, p = min(k, old), self.layout.parameter_size
        if k < old:
            survivors, _ = self._mean_rows(np.arange(k))
        rows, counters = self.rows, self.integers
        self.rows = self._allocate(k)
        self.integers = np.empty((k, self.layout.integer_size), np.int64)
        self.rows[:keep], self.integers[:keep] = rows[:keep], counters[:keep]
        if k > old:
            self.rows[old:], self.integers[old:] = mean, integers
        else:
            self.rows[:, :p] += mean[:p] - survivors[:p]
            self.rows[:, p:] = mean[p:]

    def state(self) -> dict[str, Array]:
        """Return the pool as arrays, without copying: a later mixing changes them."""
        return {"rows": self.rows, "integers": self.integers}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`; the pool then has as many models as the state.

        Raises
        ------
        StorageError
            If the state is not of this layout.
        """
        rows, integers = state["rows"], state["integers"]
        expected = (self.layout.size, self.layout.integer_size, self.layout.dtype)
        seen = (rows.shape[1:], integers.shape[1:], rows.dtype)
        if seen != ((expected[0],), (expected[1],), expected[2]) or len(rows) != len(integers) or not len(rows):
            raise StorageError(
                f"a stored pool has rows {rows.shape} {rows.dtype} and integers {integers.shape}, expected (K, "
                f"{expected[0]}) {expected[2]} and (K, {expected[1]}). Resume with the model the run began with."
            )
        if len(rows) != len(self):
            self.rows = self._allocate(len(rows))
            self.integers = np.empty(integers.shape, np.int64)
        self.rows[...] = rows
        self.integers[...] = integers


def whole_numbers(mixed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return mixed counters, truncated; one within rounding error of an integer becomes that integer."""
    nearest = np.rint(mixed)
    whole = np.abs(mixed - nearest) <= ROUNDING * np.maximum(1.0, np.abs(mixed))
    with np.errstate(invalid="ignore"):  # one beyond int64; `precise` puts it right
        return np.where(whole, nearest, np.trunc(mixed)).astype(np.int64)


def pulled(values: NDArray[np.int64], own: float) -> NDArray[np.int64]:
    """Return counters `values` (n, i), each drawn to the mean of the n: ``own v_i + (1 - own) mean``."""
    floats, n = values.astype(np.float64), len(values)
    mixed = whole_numbers(own * floats + (1 - own) * floats.mean(axis=0))
    precise(mixed, values, own * np.eye(n) + (1 - own) / n)
    return mixed


def precise(found: NDArray[Any], values: NDArray[Any], weights: NDArray[np.float64]) -> None:
    """Put `found`, weighted means of integers computed in float64, right where the integers are too large for that.

    There the mean is the first source plus the mean difference to it, no larger than the dtype allows. So a constant
    that all sources share, such as a sentinel or a hash, stays as it is.

    Parameters
    ----------
    found : integer array (m, i)
        Changed in place.
    values : integer array (n, i)
        The sources, of the same dtype.
    weights : float64 array (m, n)
        Rows sum to 1; with 0 a value is no source.
    """
    if found.dtype.itemsize < 8:
        return
    large = np.flatnonzero(((values > EXACT) | (values < -EXACT)).any(axis=0))
    ends = np.iinfo(found.dtype)
    for row, shares in zip(found if large.size else (), weights):
        sources = np.flatnonzero(shares)
        part = values[np.ix_(sources, large)]
        row[large] = part[0]
        for place in np.flatnonzero((part != part[0]).any(axis=0)):
            first, *_ = own = [int(value) for value in part[:, place]]
            way = sum(share * float(value - first) for share, value in zip(shares[sources], own))
            row[large[place]] = min(max(first + int(way), ends.min), ends.max)


@np.errstate(over="ignore", invalid="ignore")  # of models that are not finite: null in metrics.jsonl
def diagnostics(gram: NDArray[np.float64], mixing: Mixing | None = None) -> dict[str, float]:
    """Return how similar the models of a pool are, computed from their Gram matrix alone.

    ``pool_similarity_mean`` is the mean cosine over all pairs (1 if there is one model), ``pool_spread`` the root
    mean square distance of the models to their mean, relative to the mean's norm. The spread is a difference of large
    numbers: below about 3e-4 (float32 rows) it is rounding noise. Both are of what `gram` covers: in a pool of several
    widths the narrowest corner alone.

    Parameters
    ----------
    gram : array (m, m)
        From :meth:`Pool.gram`.
    mixing : Mixing, optional
        If given, the result is for the pool after this mixing; the Gram matrix of M V is ``M G M^T``.
    """
    if mixing is not None:
        matrix = mixing.dense()
        gram = matrix @ gram @ matrix.T
    m = len(gram)
    squares = np.maximum(np.diag(gram), 0.0)  # models that cancel each other mix to rounding noise of either sign
    mean_square = gram.sum() / m**2
    scale = np.sqrt(np.outer(squares, squares))
    cosine = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    pairs = cosine[~np.eye(m, dtype=bool)]
    spread = np.sqrt(max(0.0, squares.mean() - mean_square) / mean_square) if mean_square > 0 else 0.0
    return {"pool_similarity_mean": float(pairs.mean()) if m > 1 else 1.0, "pool_spread": float(spread)}


def memory_bytes() -> int:
    """Return the bytes of memory this process may use: the machine's, or less if its container says so."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
