"""One exchange of messages from the first request to the last reply: who is asked, who answered, when it is over.

A *slot* is what a method hands out (a row of the pool, say); the first valid reply for a slot wins it. A slot whose
client fails can go to a spare client within the deadline, the slots that waited longest can be asked twice from the
start, and a client that keeps silent can be asked once more, should its request or its reply have been lost. Every
request has a nonce of its own, so a reply counts for exactly the request that it answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import Message, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcross.core.errors import UploadError
from fedcross.strategies.round.guard import check
from fedcross.strategies.round.nodes import is_blocking, poll
from fedcross.strategies.wire.protocol import Payload, Round, Ticket, Upload

if TYPE_CHECKING:
    from fedcross.strategies.round.federation import Federation

#: Flower reports in the SuperLink's name that a node is gone; in one process every reply bears this id.
SUPERLINK_NODE_ID = 1
#: Somebody else answers, or the reply is to another request: the client's own one may still come.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Flower's codes for a request or a reply that it cannot give out, because its sender did not finish uploading it, say.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})


class Desk:
    """The requests of one exchange that are out, and what has come back.

    Parameters
    ----------
    nonce : bool
        Whether replies must echo their request's nonce (:func:`strategies.round.guard.check`).
    on_accepted : callable
        Called with each upload when it has won its slot; when it returns, the upload counts.
    on_rejected : callable
        Called with the client, None if unknown, and the error of every reply that is not used.
    decode : callable, optional
        Returns a checked upload as it is used (:mod:`strategies.wire.compression`); may raise ``UploadError``.
    """

    def __init__(
        self,
        nonce: bool,
        on_accepted: Callable[[Upload], None],
        on_rejected: Callable[[int | None, UploadError], None],
        decode: Callable[[Upload], Upload] = lambda upload: upload,
    ) -> None:
        self._nonce = nonce
        self._on_accepted = on_accepted
        self._on_rejected = on_rejected
        self._decode = decode
        self._tickets: dict[str, Ticket] = {}
        self._answered: set[str] = set()
        #: Whether a request has exactly one reply, whatever it looks like: so it is in one process.
        self.single = False
        #: Message id -> slot, of the requests whose reply may still win.
        self.waiting: dict[str, int] = {}
        self.won: dict[int, Upload] = {}

    def open(self, message_id: str, ticket: Ticket) -> None:
        """Expect a reply to `message_id`."""
        self._tickets[message_id] = ticket
        self.waiting[message_id] = ticket.expected.slot

    def settle(self, reply: Message) -> int | None:
        """Accept or reject `reply`; return the slot that nobody is working on any more because of it, if any."""
        asked, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        ticket = self._tickets.get(asked)
        try:
            if ticket is None:
                raise UploadError("unknown", "not an open request")
            slot = ticket.expected.slot
            if sender not in {ticket.node, SUPERLINK_NODE_ID}:
                raise UploadError("wrong_node", f"node {sender} answers for node {ticket.node}")
            if asked in self._answered:
                raise UploadError("duplicate", "answered already")
            if slot in self.won:
                raise UploadError("superseded", f"client {self.won[slot].client} was faster with slot {slot}")
            upload = self._decode(check(reply, ticket.expected, nonce=self._nonce))
        except UploadError as error:
            self._on_rejected(ticket.expected.client if ticket else None, error)
            if ticket is None or (error.reason in FOREIGN and not self.single):
                return None
            self.waiting.pop(asked, None)
            return self._orphan(ticket.expected.slot)
        self._answered.add(asked)
        self.take(upload)
        self._on_accepted(upload)
        return None

    def give_up(self, message_id: str) -> int | None:
        """Wait no longer for the reply to `message_id`; return its slot if nobody is working on it any more."""
        return self._orphan(self.waiting.pop(message_id))

    def take(self, upload: Upload) -> None:
        """Let `upload` win its slot: nothing else is waited for there."""
        self.won[upload.slot] = upload
        for message_id in [one for one, slot in self.waiting.items() if slot == upload.slot]:
            del self.waiting[message_id]

    def _orphan(self, slot: int) -> int | None:
        return None if slot in self.won or slot in self.waiting.values() else slot

    @property
    def uploads(self) -> list[Upload]:
        """The accepted uploads by slot."""
        return [self.won[slot] for slot in sorted(self.won)]


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
    desk : Desk
        Judges the replies; slots that it has already are not asked for.
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
    told : Counter
        ``asked``: requests sent; ``spares``: spare clients turned to; ``bytes``: array bytes sent.
    """

    def __init__(
        self,
        current: Round,
        grid: Grid,
        rules: Federation,
        payloads: Sequence[Payload],
        desk: Desk,
        ask: Callable[[Payload, float], tuple[Message, Ticket] | None],
        spares: list[int],
        stalest: Sequence[int],
        over: bool = False,
    ) -> None:
        self.current, self.rules, self.payloads, self.desk = current, rules, payloads, desk
        self.spares, self.over = spares, over
        self.told: Counter[str] = Counter()
        self._grid, self._ask, self._stalest = grid, ask, stalest
        self._by_slot = {payload.slot: payload for payload in payloads}
        self._reassigned: Counter[int] = Counter()
        self._repeatable: dict[str, _Request] = {}
        self._first: list[_Request] = []
        self._deadline = time.monotonic() + rules.deadline_s
        desk.single = is_blocking(grid)

    def carry_out(self) -> None:
        """Send what the desk has not got yet, and return when the exchange is over."""
        self._sent(self._push(self.open()))
        self._collect()

    def open(self) -> list[Message]:
        """Return the first requests: each slot's, those of hedged slots, and spares' for clients that are gone."""
        if self.over:
            return []
        missing = [payload for payload in self.payloads if payload.slot not in self.desk.won]
        stale = [slot for slot in self._stalest if slot not in self.desk.won][: self.rules.hedge]
        twice = list(zip(stale, self.spares))
        del self.spares[: len(twice)]
        self.told["spares"] += len(twice)
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
        silent = [message_id for message_id in handed_out if message_id in self.desk.waiting]
        self._replace([slot for one in silent if (slot := self.desk.give_up(one)) is not None])
        self._collect()

    def _sent(self, message_ids: Iterable[str]) -> None:
        """Expect replies to the messages of :meth:`open`, sent under these ids; empty ones could not be sent."""
        self._register(self._first, message_ids)
        self._first = []
        working = {*self.desk.waiting.values(), *self.desk.won}
        if not self.over:
            self._replace([payload.slot for payload in self.payloads if payload.slot not in working])

    def _collect(self) -> None:
        enough = min(self.rules.enough_replies or len(self.payloads), len(self.payloads))
        desk = self.desk
        for replies in poll(self._grid, lambda: desk.waiting if len(desk.won) < enough else (), self._deadline):
            self._settle(replies)
            self._repeat_overdue()

    def _settle(self, replies: Iterable[Message]) -> None:
        lost = [(reply, slot) for reply in replies if (slot := self.desk.settle(reply)) is not None]
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
        sent = False
        for request, message_id in zip(requests, message_ids):
            if message_id:
                sent = True
                self.desk.open(message_id, request.ticket)
                self.told.update({"asked": 1, "bytes": request.payload.nbytes})
                if self.rules.resend_s is not None and not again:
                    self._repeatable[message_id] = request
        return sent

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
        self.told["spares"] += 1
        return replace(self._by_slot[slot], client=self.spares.pop(0))

    def _replace(self, slots: Iterable[int]) -> None:
        """Hand each lost slot to the next spare client that can be asked."""
        for slot in slots:
            while slot not in self.desk.waiting.values() and (payload := self._next_spare(slot)) is not None:
                self._send(payload)

    def _repeat_overdue(self) -> None:
        """Repeat, once, each request that has had no answer for so long that it or its answer may be lost."""
        now = time.monotonic()
        if self.rules.resend_s is None or now >= self._deadline:
            return
        overdue = [one for one, request in self._repeatable.items() if request.made <= now - self.rules.resend_s]
        for message_id in overdue:
            request = self._repeatable.pop(message_id)
            if message_id in self.desk.waiting:
                self._send(request.payload, again=True)

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, if it may be, that Flower has lost or whose answer it has; return whether it was sent."""
        repeated = self._repeatable.pop(reply.metadata.reply_to_message_id, None)
        if repeated is None or not reply.has_error() or reply.error.code not in LOST_ON_THE_WAY:
            return False
        return self._send(repeated.payload, again=True)
