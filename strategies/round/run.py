"""Puts together everything that the rounds of one run need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fedcross.strategies.filters.base import Filter
from fedcross.strategies.filters.compression import CompressionFilter
from fedcross.strategies.filters.defence import DefenceFilter
from fedcross.strategies.method import Method, Start
from fedcross.strategies.round.clock import Clock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.ledger import Ledger, ReplyLog, Tell
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.round.visits import Visits


def open_run(
    method: Method,
    start: Start,
    settings: RoundSettings,
    *,
    clock: Clock | None = None,
    budgets: Mapping[int, float] | None = None,
    log: ReplyLog | None = None,
    tell: Tell | None = None,
    watches: Collection[str] = (),
    base: str = "",
    local_due: Callable[[int], bool] = lambda _: True,
    keep: int | None = None,
) -> Driver:
    """Return the driver of a run, ready for its first round.

    `clock` is the run's clock (an asynchronous method takes the real one without), `budgets` has the width of each
    client's device. `tell` hears of every event, if anybody watches one. See :class:`Driver` and :class:`Ledger`.
    """
    filters: list[Filter] = []  # from the method to the wire
    if settings.defence.enabled and method.comparable:
        filters.append(DefenceFilter(settings.defence, start))
    if not settings.compression.exact:
        filters.append(CompressionFilter(settings.compression, start))
    k = start.clients_per_round
    per_round = k if method.asynchronous else method.exchanges(k)
    listener, audits = tell if watches else None, "request_ended" in watches
    widths = bool(method.widths(start.corners))
    ledger = Ledger(settings, filters, per_round, log, budgets, base, widths=widths, tell=listener, audits=audits)
    return (Visits if method.asynchronous else Driver)(method, start, ledger, clock, local_due, keep)
