"""Puts together everything that the rounds of one run need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fedcross.core.errors import ConfigError
from fedcross.strategies.filters.base import Filter
from fedcross.strategies.filters.compression import CompressionFilter
from fedcross.strategies.filters.defence import DefenceFilter
from fedcross.strategies.method import Method, Start
from fedcross.strategies.round.clock import Clock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.ledger import Ledger, ReplyLog
from fedcross.strategies.round.settings import RoundSettings, faults_of_visits
from fedcross.strategies.round.slot import Events, Tell
from fedcross.strategies.round.visits import Visits


def open_run(
    method: Method, start: Start, settings: RoundSettings, *, clock: Clock | None = None,
    budgets: Mapping[int, float] | None = None, log: ReplyLog | None = None, tell: Tell | None = None,
    watches: Collection[str] = (), base: str = "", local_due: Callable[[int], bool] = lambda _: True,
    keep: int | None = None,
) -> Driver:  # fmt: skip
    """Return the driver of a run, ready for its first round; see :class:`Driver` and :class:`Ledger`.

    An asynchronous method takes the real clock without `clock`; `tell` hears of every event, if anybody `watches` one.
    """
    if method.asynchronous and (faults := faults_of_visits(settings, settings.defence, settings.compression)):
        raise ConfigError(faults)
    filters: list[Filter] = []  # from the method to the wire
    if settings.defence.enabled and method.comparable:
        filters.append(DefenceFilter(settings.defence, start))
    if not settings.compression.exact:
        filters.append(CompressionFilter(settings.compression, start))
    events = Events(tell, "request_ended" in watches) if tell and watches else None
    ledger = Ledger(settings, filters, log, budgets or {}, bool(method.widths(start.corners)), base, events)
    return (Visits if method.asynchronous else Driver)(method, start, ledger, clock, local_due, keep)
