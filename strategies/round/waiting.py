"""Says in the log which slots an exchange still waits for, and until when."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from logging import INFO

from flwr.common.logger import log

#: Seconds after which an exchange says that it waits; after half of its time if that is shorter.
TOLD_S = 60.0
#: Most slots that one line names.
MOST = 10
#: A deadline that is further away than this (a year) is not named; dates end with the year 9999.
FAR_S = 365 * 86_400.0


class Notice:
    """One line for one exchange, if it takes long.

    Parameters
    ----------
    number : int
        The global round.
    opened, deadline : float
        When the exchange was opened and when it ends, in seconds of one clock.
    """

    def __init__(self, number: int, opened: float, deadline: float) -> None:
        self._number, self._deadline = number, deadline
        self._when: float | None = opened + min(TOLD_S, (deadline - opened) / 2)

    def look(self, now: float, waiting: Callable[[], Collection[tuple[int, int]]]) -> None:
        """Log the line once its time has come.

        Parameters
        ----------
        now : float
            The time, of the same clock.
        waiting : callable
            Returns slot and client of each request that has no reply; called only for the line.
        """
        if self._when is None or not self._when <= now < self._deadline:
            return
        self._when = None
        if found := sorted(waiting()):
            named = ", ".join(f"slot {slot} (client {client})" for slot, client in found[:MOST])
            more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
            log(INFO, "fedcross: round %d waits for %s%s%s", self._number, named, more, _until(self._deadline - now))


def _until(left: float) -> str:
    """Return when an exchange ends at the latest, `left` seconds from now; "" if that is far away."""
    if left > FAR_S:
        return ""
    end = datetime.now().astimezone() + timedelta(seconds=left)
    return f", until {end:%H:%M:%S %Z} at the latest (federation.deadline_s)"
