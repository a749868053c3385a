"""What the reply to one request may consist of at most, and the reply that stands for a refused one.

The server derives an :class:`Allowance` from what it asked for; the grid judges a reply by it before the reply's bytes
are put together (:mod:`engines.judged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Error

#: Bytes that a record of scalars may have. Metrics and configuration of a reply are a few hundred bytes.
SCALARS = 1 << 18
#: Bytes of the head of a message, or of the table of a reply's records.
HEAD = 1 << 18
#: Flower's error code of a refused reply; Flower's own codes are below 1000.
REFUSED = 1100


@dataclass(frozen=True)
class Arrays:
    """What one record of arrays may hold: `count` arrays with, together, `nbytes` bytes as they are serialised."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Allowance:
    """The records that a reply may have.

    Attributes
    ----------
    arrays : mapping
        Name -> number and bytes of the arrays in this record.
    scalars : frozenset of str or None
        Names of the records of scalars (metrics, configuration); None: up to :data:`RECORDS`, with any names.
    """

    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    scalars: frozenset[str] | None = None

    @property
    def nbytes(self) -> int:
        """Most bytes that all arrays together may have."""
        return sum(record.nbytes for record in self.arrays.values())


#: Most records of scalars in a reply whose names nobody told.
RECORDS = 8
#: For replies without arrays: answers to queries, scores.
NO_ARRAYS = Allowance()


class Refusal(Error):  # noqa: N818 - not an exception
    """The error of a reply that was refused before it was put together.

    Parameters
    ----------
    kind : str
        Short snake_case name of the fault, used as a counter.
    detail : str
        What was seen.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(REFUSED, detail)
        self.kind = kind
