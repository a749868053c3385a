"""Digests of what server and clients send each other, for the audit trail; the same on every engine.

A digest covers names, shapes, dtypes and values, so it does not depend on how a message is packed. Arrays are read
where they lie: nothing is copied unless an array is not contiguous.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import RecordDict

from fedcross.strategies.arrays import Arrays
from fedcross.strategies.wire.protocol import EXTRA, SCALES, Payload

if TYPE_CHECKING:
    from fedcross.strategies.method import Upload


def digest_of(content: Payload | Upload) -> str:
    """Return the SHA-256 of all arrays of a payload or upload, with their groups, names, shapes and dtypes."""
    extras = content.task.extras if isinstance(content, Payload) else content.extras
    groups = {"arrays": content.arrays, **{EXTRA + name: arrays for name, arrays in extras.items()}}
    return digest({**groups, SCALES: content.scales} if content.scales else groups)


def digest(groups: Mapping[str, Arrays]) -> str:
    """Return the SHA-256 of groups of arrays: group name -> array name -> array, in the order of the names."""
    found = hashlib.sha256()
    for group, arrays in sorted(groups.items()):
        for name, array in sorted(arrays.items()):
            found.update(_head(group, name, array.dtype, array.shape))
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


@functools.lru_cache(maxsize=4096)
def _head(group: str, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    return f"{group}\0{name}\0{dtype}\0{shape}\n".encode()


def raw_digest(content: RecordDict) -> tuple[str, int]:
    """Return the SHA-256 of a message's arrays as they came, which may be malformed, and how many bytes they have."""
    found, size = hashlib.sha256(), 0
    for record, arrays in sorted(content.array_records.items()):
        for name, array in sorted(arrays.items()):
            found.update(f"{record}\0{name}\n".encode(errors="replace"))
            if isinstance(array.data, bytes):
                found.update(array.data)
                size += len(array.data)
    return found.hexdigest(), size
