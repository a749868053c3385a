"""Puts together everything that the rounds of one run need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fedcross.strategies.filters.base import Filter
from fedcross.strategies.filters.compression import CompressionFilter
from fedcross.strategies.filters.defence import DefenceFilter
from fedcross.strategies.method import Method, Start
from fedcross.strategies.round.clock import Clock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.ledger import Ledger, Tell, silent
from fedcross.strategies.round.sender import ReplyLog, Sender
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
    tell: Tell = silent,
    watches: Collection[str] = (),
    base: str = "",
    local_due: Callable[[int], bool] = lambda _: True,
    keep: int | None = None,
) -> Driver:
    """Return the driver of a run, ready for its first round.

    Parameters
    ----------
    method, start, settings
        What is run, from which model, with how many clients.
    clock : Clock, optional
        The run's clock; an asynchronous method takes the real one without.
    budgets : mapping of int to float, optional
        Client -> width of its device.
    log : ReplyLog, optional
        Keeps accepted replies until a checkpoint covers them.
    tell, watches
        Who is told of which events (:class:`strategies.round.ledger.Ledger`).
    base : str
        Digest of the part of the model that is neither trained nor sent.
    local_due : callable
        Whether clients measure their local accuracy in a round.
    keep : int, optional
        How many checkpoints are kept.
    """
    ledger = Ledger(tell, watches, local=settings.nonce and not settings.networked)
    visits = method.asynchronous
    per_round = start.clients_per_round if visits else method.exchanges(start.clients_per_round)
    sized = bool(method.widths(start.corners))
    sender = Sender(settings, ledger, filters_of(method, start, settings), per_round, log, budgets, base, sized=sized)
    kind = Visits if visits else Driver
    return kind(method, start, sender, clock, local_due, keep)


def filters_of(method: Method, start: Start, settings: RoundSettings) -> list[Filter]:
    """Return the filters of a run, from the method to the wire."""
    found: list[Filter] = []
    if settings.defence.enabled and method.comparable:
        found.append(DefenceFilter(settings.defence, start))
    if not settings.compression.exact:
        found.append(CompressionFilter(settings.compression, start))
    return found
