"""The SuperLink's handlers for announcements and objects, with a ledger whose clock and disk a test sets."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

from fedcross.engines.executor import ledger as ledgers
from fedcross.engines.executor.announced import limited
from fedcross.engines.executor.replies import AGAIN_S, Refusals
from fedcross.engines.executor.stored import within
from tests.support.fleet_door import NODE, Link, pushed, put
from tests.support.trees import name

MOST, QUOTA = 100, 1000


class MeteredDoor:
    """The guarded handlers with a clock of their own."""

    def __init__(self, free: int | None = None, most: int = MOST) -> None:
        self.now, self.link, self.free = 0.0, Link(), free
        self.ledger = ledgers.Ledger(most, QUOTA, lambda: self.now, lambda state: self.free)
        refused = Refusals()
        self._push = limited(self.link.push, most, self.ledger, refused)
        self._put = within(self.link.push_object, self.ledger, refused)

    def announce(self, made: Any, node: int = NODE) -> int:
        """Return the status."""
        return self._status(lambda: self._push(request=pushed(made, node=node), state=self.link))

    def put(self, text: str, size: int, node: int = NODE) -> int:
        """Return the status."""
        return self._status(lambda: self._put(request=put(name(text), b"x" * size, node), state=self.link))

    @staticmethod
    def _status(call: Any) -> int:
        try:
            call()
        except HTTPException as error:
            later = error.headers == {"Retry-After": str(AGAIN_S)}
            return error.status_code if later == (error.status_code == 503) else -1
        return 200
