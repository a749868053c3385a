"""One exchange of messages from the first request to the last reply: requests, spare clients, repeats, deadline.

A *slot* is one model that a method sends out for training (a row of the pool, say). The first valid reply for a slot
wins the slot. If a client fails, the server can send its slot to a spare client within the deadline (``reassign``). It
can send the least recently trained slots to two clients from the start (``hedge``). It can repeat, once, a request that
has had no reply for long (``resend_s``). Every request has its own nonce, so each reply belongs to exactly one request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Round, Trace, Upload
from fedcross.strategies.round.guard import SUPERLINK_NODE_ID, check, proves
from fedcross.strategies.round.ledger import Trail
from fedcross.strategies.round.polling import forget, is_blocking, poll
from fedcross.strategies.round.sender import Sender
from fedcross.strategies.wire.digest import digest_of
from fedcross.strategies.wire.protocol import Payload, Ticket

#: Flower's error codes for a request or reply that it cannot deliver, for example after an incomplete upload.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
#: Reasons for which the server still waits: the reply came from another node or answers another request.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Metric of an upload in the log of accepted replies: when it arrived, in seconds of the real clock.
ARRIVED = "clock-seconds"
#: Seconds after which an exchange says that it waits.
TOLD_S = 60.0


@dataclass(eq=False)
class Request:
    """A request without its message, which holds a copied model. `metadata` has its id once it is sent."""

    payload: Payload
    metadata: Metadata
    ticket: Ticket
    made: float
    repeatable: bool = True  # neither a repetition nor repeated
    answered: bool = False

    @property
    def slot(self) -> int:
        """Slot of its model."""
        return self.payload.task.slot


class Exchange:
    """One exchange. It ends when every slot is won or lost, at its deadline, or with ``enough_replies`` valid replies.

    Parameters
    ----------
    current, place : Round, mapping
        Which exchange this is, and where it stands in the run, for the trail.
    payloads : sequence of Payload
        One for each slot, the least recently trained first.
    spares : sequence of int
        Clients that may take over a slot, in the order in which they are asked.
    before, over : sequence of Upload, bool
        From the log of a run that has crashed: accepted uploads, and whether the exchange had ended.
    deadline_s, log_place, arrived
        Of an asynchronous visit: its deadline, its place in the log of replies, the real clock.

    Attributes
    ----------
    won, requests : dict of int to Upload, dict of str to Request
        Slot -> the upload that won it; message id -> what was sent under it.
    counts, rejected : Counter
        Numbers of ``requests`` sent, of ``spares`` among them, and of array ``bytes`` sent; rejected replies by reason.
    """

    def __init__(
        self,
        current: Round,
        grid: Grid,
        payloads: Sequence[Payload],
        sender: Sender,
        place: Mapping[str, int],
        spares: Sequence[int] = (),
        before: Sequence[Upload] = (),
        over: bool = False,
        deadline_s: float | None = None,
        log_place: Round | None = None,
        arrived: Callable[[], float] | None = None,
    ) -> None:
        self.current, self.settings, self.over = current, sender.settings, over
        self._log_place, self._arrived = log_place or current, arrived
        self.payloads = {payload.task.slot: payload for payload in payloads}
        self.won = {upload.slot: upload for upload in before}
        self.inherited = len(self.won)
        self.counts, self.rejected = Counter[str](), Counter[str]()
        self.trail = Trail(sender.ledger, place)
        self._grid, self._sender, self._ledger = grid, sender, sender.ledger
        self._spares = [client for client in spares if client not in {upload.client for upload in before}]
        self.requests: dict[str, Request] = {}
        self.open_slots: dict[int, list[str]] = {}  # slot -> its requests whose reply may still win
        self._first: list[Request] = []
        self._reassigned: Counter[int] = Counter()
        self._single = is_blocking(grid)
        self._opened = time.monotonic()
        self.deadline = self._opened + (sender.settings.deadline_s if deadline_s is None else deadline_s)
        self._notice = None if self._single else self._opened + min(TOLD_S, (self.deadline - self._opened) / 2)

    @property
    def waiting(self) -> dict[str, Ticket]:
        """Message id -> ticket of the requests whose reply may still win."""
        return {one: self.requests[one].ticket for ids in self.open_slots.values() for one in ids}

    def carry_out(self) -> None:
        """Send a request for every slot that is not won yet, and collect replies until the exchange is over."""
        self.send()
        self._collect()

    def send(self) -> None:
        """Send a request for every slot that is not won yet; :meth:`take` then gets the replies."""
        messages = self.open()
        self._sent(self._grid.push_messages(messages) if messages else [])

    def open(self) -> list[Message]:
        """Return the first requests: one for each slot whose client is connected, a second one for hedged slots."""
        if self.over:
            return []
        missing = [payload for slot, payload in self.payloads.items() if slot not in self.won]
        hedges = [one for payload in missing[: self.settings.hedge] if (one := self._take_spare(payload)) is not None]
        self.counts["spares"] += len(hedges)
        made = self._make([*missing, *hedges])
        self._first = [request for request, _ in made]
        return [message for _, message in made]

    def hand_in(self, replies: Iterable[Message]) -> None:
        """Continue as :meth:`carry_out` with `replies`, all that a caller has got to the messages of :meth:`open`."""
        first = list(self._first)
        self._sent([request.metadata.message_id for request in first])
        self.take(replies)
        silent = {one.metadata.message_id: one.slot for one in first}
        self._replace([slot for one, slot in silent.items() if self._drop(one, slot)])
        self._collect()

    def take(self, replies: Iterable[Message]) -> None:
        """Accept or reject `replies`; send lost slots to spare clients and repeat requests that are overdue."""
        settled = [(reply, self._settle(reply)) for reply in replies]
        self._replace([slot for reply, slot in settled if slot is not None and not self._repeat_lost(reply)])
        if excluded := self._sender.nodes.excluded:
            gone = [(one, ticket.expected.slot) for one, ticket in self.waiting.items() if ticket.node in excluded]
            self._replace([slot for one, slot in gone if self._drop(one, slot)])
        now = time.monotonic()
        if self.settings.resend_s is None or now >= self.deadline:
            return
        for message_id, request in list(self.requests.items()):
            if request.repeatable and request.made <= now - self.settings.resend_s:
                request.repeatable = False
                if message_id in self.open_slots.get(request.slot, ()):
                    self._send(request.payload, again=True)

    def forget(self) -> None:
        """End the exchange for the grid too: what it has not begun is not done, and no late reply comes."""
        if left := [one for one, request in self.requests.items() if not request.answered]:
            forget(self._grid, left)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _make(self, batch: Iterable[Payload], *, again: bool = False) -> list[tuple[Request, Message]]:
        """Return the requests for those of `batch` whose clients can be asked, and their messages."""
        now, found = time.monotonic(), []
        for payload in batch:
            made = self._sender.request(self.current, payload, max(self.deadline - now, 1.0))
            if made is not None:
                found.append((Request(payload, made[0].metadata, made[1], now, not again), made[0]))
        return found

    def _sent(self, message_ids: Iterable[str]) -> None:
        """Expect replies to the messages of :meth:`open`; spare clients replace those that were not asked."""
        self._register(self._first, message_ids)
        self._first = []
        if not self.over:
            self._replace([slot for slot in self.payloads if not self._alive(slot)])

    def _register(self, requests: Iterable[Request], message_ids: Iterable[str]) -> bool:
        """Expect replies to `requests`, sent under these ids; return whether any was sent."""
        before = len(self.requests)
        for message_id, request in zip(message_ids, requests):
            if message_id:
                self.requests[message_id] = request
                self.open_slots.setdefault(request.slot, []).append(message_id)
                self.trail.sent(message_id, request.ticket)
                self.counts.update({"requests": 1, "bytes": request.ticket.down})
        return len(self.requests) > before

    def _send(self, payload: Payload, *, again: bool = False) -> bool:
        """Send one more request; return whether it could be sent."""
        made = self._make([payload], again=again)
        return bool(made) and self._register([made[0][0]], self._grid.push_messages([made[0][1]]))

    def _next_spare(self, slot: int) -> Payload | None:
        """Return the payload of `slot` for the next spare client; None if no further one may be asked."""
        if self._reassigned[slot] >= self.settings.reassign or time.monotonic() >= self.deadline:
            return None
        if (payload := self._take_spare(self.payloads[slot])) is not None:
            self._reassigned[slot] += 1
            self.counts["spares"] += 1
        return payload

    def _take_spare(self, payload: Payload) -> Payload | None:
        """Return `payload` for the first spare client that can hold its model, which is then none any more."""
        for place, client in enumerate(self._spares if not payload.task.fixed else ()):
            if self._sender.fits(payload, client):
                del self._spares[place]
                return replace(payload, task=replace(payload.task, client=client))
        return None

    def _replace(self, slots: Iterable[int]) -> None:
        """Send each lost slot to the next spare client that is connected."""
        for slot in slots:
            while not self._alive(slot) and (payload := self._next_spare(slot)) is not None:
                self._send(payload)

    def _alive(self, slot: int) -> bool:
        """Return whether the slot is won, or a reply may still win it."""
        return slot in self.won or slot in self.open_slots

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, once, if Flower lost it, or took another node's reply for it; return whether it was."""
        request = self.requests.get(reply.metadata.reply_to_message_id)
        if request is None or not request.repeatable:
            return False
        lost = reply.has_error() and reply.error.code in LOST_ON_THE_WAY
        foreign = self.settings.nonce and not self._single and not proves(reply, request.ticket.expected)
        doubtful = self.settings.networked and foreign and reply.metadata.src_node_id != SUPERLINK_NODE_ID
        if not doubtful and not (lost and (self.settings.networked or self.settings.resend_s is not None)):
            return False
        request.repeatable = False
        return self._send(request.payload, again=True)

    # ---- replies --------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        enough = min(self.settings.enough_replies or len(self.payloads), len(self.payloads))

        def waiting() -> Mapping[str, Ticket]:
            return self.waiting if len(self.won) < enough else {}

        pull = self._sender.pull if self.settings.networked else None
        for replies in poll(self._grid, waiting, self.deadline, pull):
            self.take(replies)
            if self._notice is not None and self._notice <= time.monotonic() < self.deadline:
                self._notice = None
                self._ledger.say_waiting(self.current.number, self.waiting.values(), self.deadline - time.monotonic())
        self.forget()

    def _settle(self, reply: Message) -> int | None:
        """Accept or reject `reply`; return its slot if the slot is now lost (not won, no open request), else None."""
        asked, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        request = self.requests.get(asked)
        ticket = None if request is None else request.ticket
        try:
            if request is None:
                raise UploadError("unknown", "not an open request")
            if sender not in {request.ticket.node, SUPERLINK_NODE_ID}:
                raise UploadError("wrong_node", f"node {sender} answers for node {request.ticket.node}")
            if request.answered:
                raise UploadError("duplicate", "answered already")
            if request.slot in self.won:
                raise UploadError("superseded", f"client {self.won[request.slot].client} was faster")
            upload = check(reply, request.payload, request.ticket.expected, nonce=self.settings.nonce)
            digest = digest_of(upload) if self._ledger.audits else ""  # the arrays are still as they were sent
            seconds = round(time.monotonic() - request.ticket.made, 4)
            upload.trace = Trace(request.ticket.node, request.ticket.sent, digest, seconds, request.ticket.down)
            upload = self._sender.decode(request.payload, upload)
        except UploadError as error:
            final = self._single or error.reason not in FOREIGN
            self.trail.rejected(asked, ticket, reply, error, final)
            self._ledger.rejected(ticket.expected.client if ticket else None, error, self.rejected)
            if request is None or not final:
                return None
            return request.slot if self._drop(asked, request.slot) else None
        request.answered = True
        self.trail.accepted(asked, request.ticket, upload)
        self.open_slots.pop(upload.slot, None)
        if self._arrived is not None:
            upload.metrics = {**upload.metrics, ARRIVED: self._arrived()}
        if self._sender.log is not None:
            self._sender.log.accept(self._log_place, upload)
        self.won[upload.slot] = upload
        return None

    def _drop(self, message_id: str, slot: int) -> bool:
        """Wait for the reply to one request no longer; return whether its slot is now lost."""
        if message_id in (ids := self.open_slots.get(slot, [])):
            ids.remove(message_id)
            if not ids:
                del self.open_slots[slot]
        return not self._alive(slot)
