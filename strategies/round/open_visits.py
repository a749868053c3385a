"""What a checkpoint holds of an asynchronous run: its visits, and the limit for clients that make too many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.common.logger import log

from fedcross.strategies.method import Task

#: Visits that the median counts as having more; accepted visits in a row after which a client that lost one counts.
START, SOUND = 3, 5


@dataclass
class Lead:
    """Visits with which each client counts. One that has ``most (m + START)`` of them, accepted or lost, waits.

    m is the lower median of the clients ever asked, without those that have lost one of their last :data:`SOUND`
    visits. A client that joins counts from m on. `failed` has the accepted visits until a client is a measure again.
    """

    most: float | None
    made: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)

    def ended(self, client: int, *, accepted: bool) -> None:
        """Count a visit of `client` that has ended."""
        self.made[client] = self.made.get(client, 0) + 1
        if left := self.failed.pop(client, 1) - 1 if accepted else SOUND:
            self.failed[client] = left

    def usual(self, asked: Collection[int]) -> int:
        """Return m of the clients in `asked`; 0 if all of them failed."""
        peers = sorted(self.made.get(one, 0) for one in asked if one not in self.failed)
        return peers[(len(peers) - 1) // 2] if peers else 0

    def behind(self, idle: Sequence[int], asked: Collection[int]) -> list[int]:
        """Return those of the `idle` clients that are not ahead; `asked` are the connected ones ever asked."""
        if self.most is None or not set(asked) - self.failed.keys():
            return list(idle)
        limit = self.most * (self.usual(asked) + START)
        if ahead := [one for one in idle if self.made.get(one, 0) >= limit]:
            log(INFO, "fedcross: clients %s wait: %g visits, the limit (federation.lead)", ahead[:5], limit)
        return [one for one in idle if one not in ahead]


@dataclass
class OpenVisit:
    """A visit that is under way."""

    index: int  # in the run, from 0, in the order of dispatch
    slot: int  # whose model it trains
    client: int
    round: int  # 1 + index // K; with `repeat` it keys the client's random draws
    repeat: int  # how often this client was asked before in that round
    start: float  # seconds of the run's clock
    finish: float  # infinite while nobody knows it
    trained: bool  # whether the client is asked at all: not if it cannot meet the deadline
    seen: int  # uploads that the server had accepted when it sent the model
    task: Task
    asked: bool = False  # whether it has been


@dataclass
class VisitsState:
    """What a checkpoint holds of the visits."""

    queue: list[int]  # slots from the least to the most recently trained one
    lead: Lead
    now: float = 0.0
    dispatched: int = 0
    finished: int = 0
    accepted: int = 0
    resting: set[int] = field(default_factory=set)  # clients whose visit was lost since the last accepted upload
    last_asked: dict[int, tuple[int, int]] = field(default_factory=dict)  # client -> round, repeat of its last visit
    open: list[OpenVisit] = field(default_factory=list)
