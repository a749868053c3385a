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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from strategies.guard import check
from strategies.protocol import Payload, Ticket, Upload
from tasks.errors import UploadError

if TYPE_CHECKING:
    from strategies.federation import Federation

#: Flower reports in the SuperLink's name that a node is gone; in one process every reply bears this id.
SUPERLINK_NODE_ID = 1
#: Somebody else answers, or the reply is to another request: the client's own one may still come.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Flower's codes for a request or a reply that it cannot give out, because its sender did not finish uploading it, say.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
#: Seconds between two questions for replies, at first and at most.
PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.5


class Desk:
    """The requests of one exchange that are out, and what has come back.

    Parameters
    ----------
    nonce : bool
        Whether replies must echo their request's nonce (:func:`strategies.guard.check`).
    on_accepted : callable
        Called with each upload when it has won its slot; when it returns, the upload counts.
    on_rejected : callable
        Called with the client, None if unknown, and the error of every reply that is not used.
    decode : callable, optional
        Returns a checked upload as it is used (:mod:`strategies.compression`); may raise ``UploadError``.
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


@dataclass
class Exchange:
    """What :func:`carry_out` needs to know about one exchange.

    Attributes
    ----------
    grid : Grid
        Where the clients are.
    rules : Federation
        When it is over, and how many spares may be asked.
    ask : callable
        Returns the message for a payload that may take so many seconds, and its ticket; None if the payload's client is
        not connected.
    spares : list of int
        Clients that may take over a slot, the first one first; emptied as they are asked.
    stalest : sequence of int
        All slots, those that waited longest for training first.
    """

    grid: Grid
    rules: Federation
    ask: Callable[[Payload, float], tuple[Message, Ticket] | None]
    spares: list[int]
    stalest: Sequence[int]


def carry_out(exchange: Exchange, payloads: Sequence[Payload], desk: Desk) -> Counter[str]:
    """Send what `desk` has not got yet, and return when the exchange is over.

    It is over when every slot is won or lost, ``deadline_s`` have passed, or ``enough_replies`` are there. Nothing
    waits for ever, as long as the grid itself answers.

    Returns
    -------
    Counter
        ``asked``: requests sent; ``spares``: those of them that went to spare clients; ``bytes``: array bytes sent.
    """
    rules, grid = exchange.rules, exchange.grid
    deadline = time.monotonic() + rules.deadline_s
    told: Counter[str] = Counter()
    by_slot = {payload.slot: payload for payload in payloads}
    reassigned: Counter[int] = Counter()
    repeatable: dict[str, tuple[Payload, float]] = {}  # message id -> what was asked and when

    def send(batch: Iterable[Payload], *, again: bool = False) -> list[int]:
        """Send `batch`; return the slots that nobody works on because their request could not be sent."""
        batch = list(batch)
        made = [exchange.ask(payload, max(deadline - time.monotonic(), 1.0)) for payload in batch]
        messages = [one[0] for one in made if one is not None]
        ids = iter(list(grid.push_messages(messages)) if messages else [])
        for payload, one in zip(batch, made):
            message_id = next(ids, None) if one is not None else None
            if one is not None and message_id:
                desk.open(message_id, one[1])
                told.update({"asked": 1, "bytes": payload.nbytes})
                if rules.resend_s is not None and not again:
                    repeatable[message_id] = payload, time.monotonic()
        return [payload.slot for payload in batch if payload.slot not in desk.waiting.values()]

    def replace_lost(slots: Iterable[int]) -> None:
        """Hand each lost slot to the next spare client that can be asked."""
        for slot in slots:
            while exchange.spares and reassigned[slot] < rules.reassign and slot not in desk.waiting.values():
                reassigned[slot] += 1
                told["spares"] += 1
                send([replace(by_slot[slot], client=exchange.spares.pop(0))])

    def repeat_overdue() -> None:
        """Repeat, once, each request that has had no answer for so long that it or its answer may be lost."""
        late = time.monotonic() - (rules.resend_s or 0.0)
        overdue = [message_id for message_id, (_, sent) in repeatable.items() if sent <= late]
        asked = [(message_id, repeatable.pop(message_id)[0]) for message_id in overdue]
        send((payload for message_id, payload in asked if message_id in desk.waiting), again=True)

    def repeat_lost(reply: Message) -> bool:
        """Repeat the request, if it may be, that Flower has lost or whose answer it has; return whether it was sent."""
        repeated = repeatable.pop(reply.metadata.reply_to_message_id, None)
        if repeated is None or not reply.has_error() or reply.error.code not in LOST_ON_THE_WAY:
            return False
        return not send([repeated[0]], again=True)

    # A grid of this machine waits by itself, and each of its clients answers once.
    pause, desk.single = PAUSE_S, getattr(grid, "blocking", False)
    lost = send(payload for payload in payloads if payload.slot not in desk.won)
    stale = [slot for slot in exchange.stalest if slot not in desk.won][: rules.hedge]
    twice = list(zip(stale, exchange.spares))
    del exchange.spares[: len(twice)]
    told["spares"] += len(twice)
    send(replace(by_slot[slot], client=client) for slot, client in twice)
    replace_lost(slot for slot in lost if slot not in desk.waiting.values())

    enough = min(rules.enough_replies or len(payloads), len(payloads))
    while desk.waiting and len(desk.won) < enough:
        replies = list(grid.pull_messages(set(desk.waiting)))
        orphans = {reply: slot for reply in replies if (slot := desk.settle(reply)) is not None}
        replace_lost([slot for reply, slot in orphans.items() if not repeat_lost(reply)])
        if time.monotonic() >= deadline:
            break
        repeat_overdue()
        pause = PAUSE_S if replies else min(pause * 2, LONGEST_PAUSE_S)
        if desk.waiting and not desk.single:
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
    return told
