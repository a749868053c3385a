"""One visit that is under way: which slot's model went to which client, when, and what came back."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.wire.protocol import Upload

#: Metric of an upload in the log of accepted replies: when it arrived, in seconds of the real clock.
ARRIVED = "clock-seconds"
#: Client of a visit of which a replay knows only that it never ended.
NOBODY = -1


@dataclass(eq=False)
class OpenVisit:
    """A visit from its dispatch until the method has used its upload, or given it up.

    Attributes
    ----------
    index : int
        Number of the visit in the run, from 0, in the order of dispatch.
    slot, client : int
        Whose model it trains, and who trains it (:data:`NOBODY` where a replay cannot know).
    round, repeat : int
        Key the client's random draws: ``1 + index // K``, and how often this client was asked before in that round.
    start, finish : float
        Seconds of the run's clock; `finish` is infinite while nobody knows it.
    trained : bool
        Whether the client is asked at all: not if it cannot meet the deadline.
    asked : bool
        Whether the client has been asked, by this process or by one before it.
    seen : int
        Uploads that the server had accepted when it sent the model.
    exchange : Exchange or None
        Request and reply; None as long as this process has not asked the client.
    rejected : Counter
        Replies that were rejected, by reason.
    """

    index: int
    slot: int
    client: int
    round: int
    repeat: int
    start: float
    finish: float
    trained: bool
    seen: int
    asked: bool = False
    exchange: Exchange | None = field(default=None, repr=False)
    rejected: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def upload(self) -> Upload | None:
        """The accepted upload; None if there is none (yet)."""
        return None if self.exchange is None else self.exchange.inbox.won.get(self.slot)

    @property
    def waiting(self) -> bool:
        """Whether a reply may still come."""
        return self.exchange is not None and bool(self.exchange.inbox.waiting)

    def knows(self, message_id: str) -> bool:
        """Return whether `message_id` is a request of this visit."""
        return self.exchange is not None and self.exchange.inbox.knows(message_id)

    def give_up(self) -> None:
        """Wait no longer."""
        if self.exchange is not None:
            for message_id in list(self.exchange.inbox.waiting):
                self.exchange.inbox.give_up(message_id)

    def plain(self) -> dict[str, Any]:
        """Return the visit as JSON values for a checkpoint; what came back is not among them."""
        names = ("index", "slot", "client", "round", "repeat", "start", "trained", "seen", "asked")
        finish = None if math.isinf(self.finish) else self.finish
        return {**{name: getattr(self, name) for name in names}, "finish": finish}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> OpenVisit:
        """Return the visit that :meth:`plain` described."""
        finish = plain["finish"]
        return cls(**{**plain, "finish": math.inf if finish is None else float(finish)})

    def line(self, number: int, group: int, accepted: int) -> dict[str, Any]:
        """Return the visit's line of ``visits.jsonl``; `accepted`: uploads the server had accepted before it."""
        return {
            "visit": self.index,
            "round": number,
            "group": group,
            "slot": self.slot,
            "client": self.client,
            "start": self.start,
            "finish": self.finish,
            "accepted": self.upload is not None,
            "staleness": accepted - self.seen,
        }
