"""One exchange of messages from the first request to the last reply: who is asked, who answered, when it is over.

A *slot* is what a method hands out (a row of the pool, say); the first valid reply for a slot wins it. A slot whose
client fails can go to a spare client within the deadline, the slots that waited longest can be asked twice from the
start, and a client that keeps silent can be asked once more, should its request or its reply have been lost. Every
request has a nonce of its own, so a reply counts for exactly the request that it answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from flwr.app import Message, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcross.strategies.round.guard import Inbox
from fedcross.strategies.wire.protocol import Payload, Round, Ticket

if TYPE_CHECKING:
    from fedcross.strategies.round.federation import Federation

#: Flower's codes for a request or a reply that it cannot give out, because its sender did not finish uploading it, say.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
#: Seconds between two questions for replies, at first and at most.
PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.5


@runtime_checkable
class LocalClients(Protocol):
    """What a grid declares whose clients are part of this machine; Flower's own grids declare nothing.

    Attributes
    ----------
    blocking : bool
        Whether ``pull_messages`` itself does the clients' work, so that nobody need wait between two calls, and every
        request has exactly one reply.
    partitions : dict of int to int
        Node id -> partition id, known without asking the nodes.
    """

    blocking: bool
    partitions: dict[int, int]


def is_blocking(grid: Grid) -> bool:
    """Return whether `grid` waits by itself, and each of its clients answers exactly once."""
    return isinstance(grid, LocalClients) and grid.blocking


class _Request(NamedTuple):
    """A request that has been made: for what, how its reply is judged, when.

    Its message id is in `metadata` once it is sent. The message itself is not kept: it holds a model.
    """

    payload: Payload
    metadata: Metadata
    ticket: Ticket
    made: float


class Exchange:
    """One exchange, opened, collected and closed in the same way whoever sends its messages.

    :meth:`carry_out` sends and collects by itself. Flower's own loop does it in between instead: it sends what
    :meth:`open` returned, waits as long as it likes, and :meth:`hand_in` goes on with what it has collected.

    An exchange is over when every slot is won or lost, ``deadline_s`` have passed since it was opened, or
    ``enough_replies`` are there. Nothing waits for ever, as long as the grid itself answers.

    Parameters
    ----------
    current : Round
        Which exchange of which round this is.
    grid : Grid
        Where the clients are.
    rules : Federation
        When it is over, and how many spares may be asked.
    payloads : sequence of Payload
        What is handed out, one payload per slot.
    inbox : Inbox
        Judges the replies; slots that are won there already are not asked for.
    ask : callable
        Returns the message for a payload that may take so many seconds, and its ticket; None if the payload's client is
        not connected.
    spares : list of int
        Clients that may take over a slot, the first one first; emptied as they are asked.
    stalest : sequence of int
        All slots, those that waited longest for training first.
    over : bool
        Whether it had ended before: then nobody is asked any more.

    Attributes
    ----------
    counts : Counter
        ``requests`` sent, ``spares`` that were asked, array ``bytes`` sent.
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
    ) -> None:
        self.current, self.rules, self.payloads, self.inbox = current, rules, payloads, inbox
        self.spares, self.over = spares, over
        self.counts: Counter[str] = Counter()
        self._grid, self._ask, self._stalest = grid, ask, stalest
        self._by_slot = {payload.slot: payload for payload in payloads}
        self._reassigned: Counter[int] = Counter()
        self._repeatable: dict[str, _Request] = {}
        self._first: list[_Request] = []
        self._deadline = time.monotonic() + rules.deadline_s
        inbox.single = is_blocking(grid)

    def carry_out(self) -> None:
        """Send what the inbox has not got yet, and return when the exchange is over."""
        self._sent(self._push(self.open()))
        self._collect()

    def open(self) -> list[Message]:
        """Return the first requests: each slot's, those of hedged slots, and spares' for clients that are gone."""
        if self.over:
            return []
        missing = [payload for payload in self.payloads if payload.slot not in self.inbox.won]
        stale = [slot for slot in self._stalest if slot not in self.inbox.won][: self.rules.hedge]
        twice = list(zip(stale, self.spares))
        del self.spares[: len(twice)]
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
        """Go on with `replies`, all that somebody else has collected for the messages of :meth:`open`.

        Who has not answered them is not waited for any longer. What is lost goes to spare clients, and is asked for
        once more, as in :meth:`carry_out`, in what is left of the deadline.
        """
        handed_out = [request.metadata.message_id for request in self._first]
        self._sent(handed_out)
        self._settle(replies)
        self._repeat_overdue()
        silent = [message_id for message_id in handed_out if message_id in self.inbox.waiting]
        self._replace([slot for one in silent if (slot := self.inbox.give_up(one)) is not None])
        self._collect()

    def _sent(self, message_ids: Iterable[str]) -> None:
        """Expect replies to the messages of :meth:`open`, sent under these ids; empty ones could not be sent."""
        self._register(self._first, message_ids)
        self._first = []
        working = {*self.inbox.waiting.values(), *self.inbox.won}
        if not self.over:
            self._replace([payload.slot for payload in self.payloads if payload.slot not in working])

    def _collect(self) -> None:
        enough = min(self.rules.enough_replies or len(self.payloads), len(self.payloads))
        inbox = self.inbox
        for replies in poll(self._grid, lambda: inbox.waiting if len(inbox.won) < enough else (), self._deadline):
            self._settle(replies)
            self._repeat_overdue()

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
        self.counts.update({"requests": len(sent), "bytes": sum(request.ticket.down for request in sent.values())})
        if self.rules.resend_s is not None and not again:
            self._repeatable.update(sent)
        return bool(sent)

    def _send(self, payload: Payload, *, again: bool = False) -> bool:
        """Send one more request; return whether it could be sent."""
        made = self._make([payload])
        ids = self._push([message for _, message in made])
        return self._register([request for request, _ in made], ids, again=again)

    def _next_spare(self, slot: int) -> Payload | None:
        """Return what the next spare client gets for `slot`, None if none may be asked any more."""
        if not self.spares or self._reassigned[slot] >= self.rules.reassign or time.monotonic() >= self._deadline:
            return None
        self._reassigned[slot] += 1
        self.counts["spares"] += 1
        return replace(self._by_slot[slot], client=self.spares.pop(0))

    def _replace(self, slots: Iterable[int]) -> None:
        """Hand each lost slot to the next spare client that can be asked."""
        for slot in slots:
            while slot not in self.inbox.waiting.values() and (payload := self._next_spare(slot)) is not None:
                self._send(payload)

    def _repeat_overdue(self) -> None:
        """Repeat, once, each request that has had no answer for so long that it or its answer may be lost."""
        now = time.monotonic()
        if self.rules.resend_s is None or now >= self._deadline:
            return
        overdue = [one for one, request in self._repeatable.items() if request.made <= now - self.rules.resend_s]
        for message_id in overdue:
            request = self._repeatable.pop(message_id)
            if message_id in self.inbox.waiting:
                self._send(request.payload, again=True)

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, if it may be, that Flower has lost or whose answer it has; return whether it was sent."""
        repeated = self._repeatable.pop(reply.metadata.reply_to_message_id, None)
        if repeated is None or not reply.has_error() or reply.error.code not in LOST_ON_THE_WAY:
            return False
        return self._send(repeated.payload, again=True)


def poll(grid: Grid, open_ids: Callable[[], Collection[str]], deadline: float) -> Iterator[list[Message]]:
    """Yield what each look at the grid finds, nothing too, until nothing is open or the time is over.

    Parameters
    ----------
    grid : Grid
        Asked again after a pause that grows while nothing comes; at once if it waits by itself.
    open_ids : callable
        Returns the ids of the messages whose replies are waited for; called before each look.
    deadline : float
        When to stop, in seconds of ``time.monotonic``; the grid is asked once in any case.
    """
    pause, blocking = PAUSE_S, is_blocking(grid)
    while waiting := set(open_ids()):
        replies = list(grid.pull_messages(waiting))
        yield replies
        left = deadline - time.monotonic()
        if left <= 0:
            return
        pause = PAUSE_S if replies else min(pause * 2, LONGEST_PAUSE_S)
        if not blocking and open_ids():
            time.sleep(min(pause, left))


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all are there or `timeout_s` seconds have passed."""
    waiting = {message_id for message_id in message_ids if message_id}
    for replies in poll(grid, lambda: waiting, time.monotonic() + timeout_s):
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
