"""One exchange of messages from the first request to the last reply: requests, spare clients, repeats, deadline.

A *slot* is one model that a method sends out for training (a row of the pool, say). The first valid reply for a slot
wins the slot. If a client fails, the server can send its slot to a spare client within the deadline (``reassign``). It
can send the least recently trained slots to two clients from the start (``hedge``). It can repeat, once, a request that
has had no reply for long, in case the request or the reply was lost (``resend_s``). Every request has its own nonce, so
the server can match each reply to exactly one request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from flwr.app import Message, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcross.core.allowance import Allowance
from fedcross.strategies.round.guard import SUPERLINK_NODE_ID, Inbox
from fedcross.strategies.round.waiting import Notice
from fedcross.strategies.wire.protocol import Payload, Round, Ticket

if TYPE_CHECKING:
    from fedcross.strategies.round.federation import Federation

#: Flower's error codes for a request or reply that it cannot deliver, for example after an incomplete upload.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
#: Pause in seconds between two polls for replies: the first one, and the longest one while clients are quick.
PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.2
#: In a long wait a pause may be the first share of the time since the last reply, the second one of the time that is
#: left, and at most so many seconds: a poll costs a SuperLink about 10 ms of a core, and hours of training answer no.
WAIT_SHARE, LEFT_SHARE, MOST_PAUSE_S = 0.02, 0.1, 2.0


@runtime_checkable
class LocalClients(Protocol):
    """Attributes of a grid whose clients run on this machine; Flower's own grids do not have them.

    Attributes
    ----------
    blocking : bool
        Whether ``pull_messages`` itself runs the clients, so that the caller need not pause between two calls, and
        every request has exactly one reply.
    partitions : dict of int to int
        Node id -> partition id, known without asking the nodes.
    """

    blocking: bool
    partitions: dict[int, int]


@runtime_checkable
class Judging(Protocol):
    """A grid that refuses a reply with more in it than it was told of (:class:`engines.judged.JudgedGrid`)."""

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """Set what the replies to these messages may consist of: message id -> allowance."""


@runtime_checkable
class Forgetful(Protocol):
    """A grid that can drop requests, as those on this machine can; Flower's own grids cannot."""

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop those of these messages that have no reply yet; none will be pulled."""


def forget(grid: Grid, message_ids: Iterable[str]) -> None:
    """Let a grid that can (:class:`Forgetful`) drop those of these requests that have no reply: nobody waits for it."""
    if isinstance(grid, Forgetful):
        grid.forget(message_ids)


def is_blocking(grid: Grid) -> bool:
    """Return whether ``pull_messages`` of `grid` waits by itself and every request has exactly one reply."""
    return isinstance(grid, LocalClients) and grid.blocking


class _Request(NamedTuple):
    """A request: its payload, the ticket for its reply, and when it was made.

    `metadata` holds the message id once the request is sent. The message itself is not kept: it holds a copied model.
    """

    payload: Payload
    metadata: Metadata
    ticket: Ticket
    made: float


class Exchange:
    """One exchange, which either this class or Flower's own loop drives.

    :meth:`carry_out` sends the requests and collects the replies itself. Flower's own loop instead sends the messages
    that :meth:`open` returns, waits as long as it likes, and passes the replies it has collected to :meth:`hand_in`.

    An exchange ends when every slot is won or lost, when ``deadline_s`` seconds have passed since it was opened, or
    when ``enough_replies`` valid replies have arrived. It always ends, as long as the grid itself returns.

    Parameters
    ----------
    current : Round
        Which exchange of which round this is.
    grid : Grid
        Connection to the clients.
    rules : Federation
        Deadline, number of replies that suffice, and how often a spare client may be asked.
    payloads : sequence of Payload
        What the server sends, one payload per slot.
    inbox : Inbox
        Accepts or rejects the replies; no request is sent for slots that are already won there.
    ask : callable
        ``(payload, seconds) -> (message, ticket)``, with the seconds that the client may take; None if the payload's
        client is not connected.
    spares : list of int
        Clients that may take over a slot, in the order in which they are asked; each is removed when it is asked.
    stalest : sequence of int
        All slots, the least recently trained first.
    over : bool
        Whether the exchange had ended before a restart of the server: then no request is sent.
    fits : callable, optional
        Whether a client can hold the model of a payload; spare clients that cannot are not asked.

    Attributes
    ----------
    counts : Counter
        Numbers of ``requests`` sent, of ``spares`` among them, and of array ``bytes`` sent.
    """

    def __init__(
        self,
        current: Round,
        grid: Grid,
        rules: Federation,
        payloads: Sequence[Payload],
        inbox: Inbox,
        ask: Callable[[Payload, float], tuple[Message, Ticket] | None],
        spares: list[int],
        stalest: Sequence[int],
        over: bool = False,
        fits: Callable[[Payload, int], bool] = lambda _payload, _client: True,
    ) -> None:
        self._fits = fits
        self.current, self.rules, self.payloads, self.inbox = current, rules, payloads, inbox
        self.spares, self.over = spares, over
        self.counts: Counter[str] = Counter()
        self._grid, self._ask, self._stalest = grid, ask, stalest
        self._by_slot = {payload.slot: payload for payload in payloads}
        self._reassigned: Counter[int] = Counter()
        self._repeatable: dict[str, _Request] = {}
        self._unrepeated: dict[str, _Request] = {}
        self._first: list[_Request] = []
        opened = time.monotonic()
        self._deadline = opened + rules.deadline_s
        #: How many slots had been won before this exchange was opened.
        self.inherited = len(inbox.won)
        inbox.single = is_blocking(grid)
        #: None where clients do not work beside the server.
        self._notice = None if inbox.single else Notice(current.number, opened, self._deadline)

    @property
    def deadline(self) -> float:
        """When the exchange ends, in seconds of ``time.monotonic``."""
        return self._deadline

    def carry_out(self) -> None:
        """Send a request for every slot that is not won yet, collect replies, and return when the exchange is over."""
        self.send()
        self._collect()

    def send(self) -> None:
        """Send a request for every slot that is not won yet; :meth:`take` then gets the replies."""
        self._sent(self._push(self.open()))

    def take(self, replies: Iterable[Message]) -> None:
        """Accept or reject `replies`; send lost slots to spare clients and repeat requests that are overdue."""
        self._settle(replies)
        self._repeat_overdue()

    def open(self) -> list[Message]:
        """Return the first requests: one for each slot, a second one for hedged slots.

        A spare client takes the place of a client that is not connected.
        """
        if self.over:
            return []
        missing = [payload for payload in self.payloads if payload.slot not in self.inbox.won]
        stale = [slot for slot in self._stalest if slot not in self.inbox.won][: self.rules.hedge]
        twice = [(slot, client) for slot in stale if (client := self._take_spare(slot)) is not None]
        self.counts["spares"] += len(twice)
        hedges = [replace(self._by_slot[slot], client=client) for slot, client in twice]
        made = self._make([*missing, *hedges])
        asked = {request.payload.slot for request, _ in made}
        for slot in [payload.slot for payload in missing if payload.slot not in asked]:
            instead: list[tuple[_Request, Message]] = []
            while not instead and (payload := self._next_spare(slot)) is not None:
                instead = self._make([payload])
            made += instead
        self._first = [request for request, _ in made]
        return [message for _, message in made]

    def hand_in(self, replies: Iterable[Message]) -> None:
        """Continue with `replies`, all that the caller has collected for the messages of :meth:`open`.

        Clients that have not replied count as failed. Lost slots go to spare clients and lost requests are repeated, as
        in :meth:`carry_out`, in the time that is left until the deadline.
        """
        handed_out = [request.metadata.message_id for request in self._first]
        self._sent(handed_out)
        self._settle(replies)
        self._repeat_overdue()
        silent = [message_id for message_id in handed_out if message_id in self.inbox.waiting]
        self._replace([slot for one in silent if (slot := self.inbox.give_up(one)) is not None])
        self._collect()

    def _sent(self, message_ids: Iterable[str]) -> None:
        """Expect replies to the messages of :meth:`open`, sent under these ids; an empty id marks one not sent."""
        self._register(self._first, message_ids)
        self._first = []
        working = {*self.inbox.waiting.values(), *self.inbox.won}
        if not self.over:
            self._replace([payload.slot for payload in self.payloads if payload.slot not in working])

    def _collect(self) -> None:
        enough = min(self.rules.enough_replies or len(self.payloads), len(self.payloads))
        inbox = self.inbox
        for replies in poll(self._grid, lambda: inbox.waiting if len(inbox.won) < enough else (), self._deadline):
            self.take(replies)
            if self._notice is not None:
                self._notice.look(time.monotonic(), inbox.open_clients)
        self.forget()

    def forget(self) -> None:
        """End the exchange for the grid too: what it has not begun is not done, and no late reply comes."""
        if left := self.inbox.tickets.keys() - self.inbox.answered:
            forget(self._grid, left)

    def _settle(self, replies: Iterable[Message]) -> None:
        lost = [(reply, slot) for reply in replies if (slot := self.inbox.settle(reply)) is not None]
        self._replace([slot for reply, slot in lost if not self._repeat_lost(reply)])

    def _make(self, batch: Iterable[Payload]) -> list[tuple[_Request, Message]]:
        """Return the requests for those of `batch` whose clients are connected, and their messages."""
        now = time.monotonic()
        made = [(payload, self._ask(payload, max(self._deadline - now, 1.0))) for payload in batch]
        return [(_Request(payload, one[0].metadata, one[1], now), one[0]) for payload, one in made if one is not None]

    def _push(self, messages: Sequence[Message]) -> list[str]:
        return list(self._grid.push_messages(messages)) if messages else []

    def _register(self, requests: Iterable[_Request], message_ids: Iterable[str], *, again: bool = False) -> bool:
        """Expect replies to `requests`, sent under these ids; return whether one of them was sent."""
        sent = {message_id: request for message_id, request in zip(message_ids, requests) if message_id}
        self.inbox.expect({message_id: request.ticket for message_id, request in sent.items()})
        if isinstance(self._grid, Judging):
            self._grid.allow({message_id: request.ticket.expected.allowance for message_id, request in sent.items()})
        self.counts.update({"requests": len(sent), "bytes": sum(request.ticket.down for request in sent.values())})
        if self.rules.resend_s is not None and not again:
            self._repeatable.update(sent)
        if self.rules.networked and not again:
            self._unrepeated.update(sent)
        return bool(sent)

    def _send(self, payload: Payload, *, again: bool = False) -> bool:
        """Send one more request; return whether it could be sent."""
        made = self._make([payload])
        ids = self._push([message for _, message in made])
        return self._register([request for request, _ in made], ids, again=again)

    def _next_spare(self, slot: int) -> Payload | None:
        """Return the payload of `slot` for the next spare client; None if no further one may be asked."""
        if self._reassigned[slot] >= self.rules.reassign or time.monotonic() >= self._deadline:
            return None
        if (client := self._take_spare(slot)) is None:
            return None
        self._reassigned[slot] += 1
        self.counts["spares"] += 1
        return replace(self._by_slot[slot], client=client)

    def _take_spare(self, slot: int) -> int | None:
        """Return the first spare client that can hold the model of `slot`, which is then none any more."""
        for place, client in enumerate(self.spares):
            if self._fits(self._by_slot[slot], client):
                return self.spares.pop(place)
        return None

    def _replace(self, slots: Iterable[int]) -> None:
        """Send each lost slot to the next spare client that is connected."""
        for slot in slots:
            while slot not in self.inbox.waiting.values() and (payload := self._next_spare(slot)) is not None:
                self._send(payload)

    def _repeat_overdue(self) -> None:
        """Repeat, once, each request without a reply for ``resend_s`` seconds: it or its reply may be lost."""
        now = time.monotonic()
        if self.rules.resend_s is None or now >= self._deadline:
            return
        overdue = [one for one, request in self._repeatable.items() if request.made <= now - self.rules.resend_s]
        for message_id in overdue:
            request = self._repeatable.pop(message_id)
            if message_id in self.inbox.waiting:
                self._send(request.payload, again=True)

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, once, if its reply may not be its client's; return whether it was sent.

        That is a reply without the request's nonce: Flower takes one reply to a request, and this one was it. Where
        ``resend_s`` allows it, a request is also repeated if Flower lost it or its reply.
        """
        asked = reply.metadata.reply_to_message_id
        repeated, doubted = self._repeatable.pop(asked, None), self._unrepeated.pop(asked, None)
        lost = reply.has_error() and reply.error.code in LOST_ON_THE_WAY
        taken = lost or reply.metadata.src_node_id != SUPERLINK_NODE_ID  # by a reply that may not be the client's
        if doubted is not None and asked in self.inbox.doubtful and taken:
            return self._send(doubted.payload, again=True)
        if repeated is None or not lost:
            return False
        return self._send(repeated.payload, again=True)


def poll(grid: Grid, open_ids: Callable[[], Collection[str]], deadline: float) -> Iterator[list[Message]]:
    """Yield the replies that each poll of the grid finds (may be none), until none is open or the deadline has passed.

    Parameters
    ----------
    grid : Grid
        Polled again after a pause, which grows while no reply comes (:func:`longest_pause`); without a pause if the
        grid waits by itself.
    open_ids : callable
        Returns the ids of the messages whose replies are still missing; called before each poll.
    deadline : float
        When to stop, in seconds of ``time.monotonic``; the grid is polled at least once.
    """
    pause, blocking, last = PAUSE_S, is_blocking(grid), time.monotonic()
    while waiting := set(open_ids()):
        replies = list(grid.pull_messages(waiting))
        yield replies
        now = time.monotonic()
        left, last = deadline - now, now if replies else last
        if left <= 0:
            return
        pause = PAUSE_S if replies else min(pause * 2, longest_pause(now - last, left))
        if not blocking and open_ids():
            time.sleep(min(pause, left))


def longest_pause(waited_s: float, left_s: float) -> float:
    """Return the most seconds until the next poll, `waited_s` after the last reply and `left_s` before the deadline."""
    return min(MOST_PAUSE_S, max(LONGEST_PAUSE_S, min(WAIT_SHARE * waited_s, LEFT_SHARE * left_s)))


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all have arrived or `timeout_s` seconds have passed."""
    waiting = {message_id for message_id in message_ids if message_id}
    for replies in poll(grid, lambda: waiting, time.monotonic() + timeout_s):
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
