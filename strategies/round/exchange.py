"""One exchange of messages from the first request to the last reply: requests, spare clients, repeats, deadline.

A *slot* is one model that a method sends out for training (a row of the pool, say). Its first valid reply wins it. The
server can send the slot of a failed client to a spare one (``reassign``), the least recently trained slots to two from
the start (``hedge``), and a request without a reply once more (``resend_s``). A nonce links each reply to its request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Round, Trace, Upload
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.polling import Pauses, forget
from fedcross.strategies.round.trail import since, tell_rejection, whom
from fedcross.strategies.wire import protocol
from fedcross.strategies.wire.protocol import SUPERLINK_NODE_ID, Payload, Request, digest_of

#: Reasons for which the server still waits: the reply came from another node or answers another request.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Seconds after which an exchange says that it waits.
TOLD_S = 60.0


class Exchange:
    """One exchange. It ends when every slot is won or lost, at its deadline, or with ``enough_replies`` valid replies.

    Parameters
    ----------
    ledger, current, visit : Ledger, Round, int
        What the run's exchanges share, which exchange this is, and the number under which clients store its state.
    payloads, spares : sequence of Payload, sequence of int
        One for each slot, the least recently trained first; clients that may take over a slot, in the order of asking.
    before, over : sequence of Upload, bool
        From the log of a run that has crashed: accepted uploads, and whether the exchange had ended.

    Attributes
    ----------
    won, requests, open_slots : dict of int to Upload, of str to Request, of int to list of str
        Slot -> the upload that won it; message id -> what was sent; slot -> its requests whose reply may still win.
    counts, rejected : Counter
        Numbers of ``requests`` sent, of ``spares`` among them, and of array ``bytes`` sent; rejected replies by reason.
    """

    def __init__(
        self,
        ledger: Ledger,
        current: Round,
        visit: int,
        grid: Grid,
        payloads: Sequence[Payload],
        spares: Sequence[int] = (),
        before: Sequence[Upload] = (),
        over: bool = False,
    ) -> None:
        self.ledger, self.settings, self.current, self.visit, self.over = ledger, ledger.settings, current, visit, over
        self._grid = grid
        self.payloads = {payload.task.slot: payload for payload in payloads}
        self.won = {upload.slot: upload for upload in before}
        self.inherited = len(self.won)
        self.counts, self.rejected = Counter[str](), Counter[str]()
        self.place = {"round": current.number, "exchange": current.exchange}  # in events
        self.rejections: list[dict[str, Any]] = []
        self._spares = [client for client in spares if client not in {upload.client for upload in before}]
        self._reassigned: Counter[int] = Counter()
        for payload in payloads:
            if over or payload.task.slot in self.won:  # asked by the process before this one
                self.counts.update({"requests": 1, "bytes": payload.nbytes})
        self.requests: dict[str, Request] = {}
        self.open_slots: dict[int, list[str]] = {}
        self._first: list[tuple[Metadata, Request]] = []
        self._single: bool = getattr(grid, "blocking", False)
        self.deadline = time.monotonic() + self.settings.deadline_s

    @property
    def waiting(self) -> dict[str, Request]:
        """Message id -> the requests whose reply may still win."""
        return {one: self.requests[one] for ids in self.open_slots.values() for one in ids}

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
        made = [pair for payload in (*missing, *hedges) if (pair := self._request(payload)) is not None]
        self._first = [(message.metadata, sent) for message, sent in made]
        return [message for message, _ in made]

    def hand_in(self, replies: Iterable[Message]) -> None:
        """Continue as :meth:`carry_out` with `replies`, all that a caller has got to the messages of :meth:`open`."""
        first = {metadata.message_id: sent.payload.task.slot for metadata, sent in self._first}
        self._sent(first)
        self.take(replies)
        self._replace([slot for one, slot in first.items() if self._drop(one, slot)])
        self._collect()

    def take(self, replies: Iterable[Message]) -> None:
        """Accept or reject `replies`; send lost slots to spare clients and repeat requests that are overdue."""
        settled = [(reply, self._settle(reply)) for reply in replies]
        self._replace([slot for reply, slot in settled if slot is not None and not self._repeat_lost(reply)])
        if excluded := self.ledger.nodes.excluded:
            gone = [(one, sent.payload.task.slot) for one, sent in self.waiting.items() if sent.node in excluded]
            self._replace([slot for one, slot in gone if self._drop(one, slot)])
        now = time.monotonic()
        if self.settings.resend_s is None or now >= self.deadline:
            return
        for message_id, sent in list(self.requests.items()):
            if sent.repeatable and sent.made <= now - self.settings.resend_s:
                sent.repeatable = False
                if message_id in self.open_slots.get(sent.payload.task.slot, ()):
                    self._send(sent.payload, again=True)

    def forget(self) -> None:
        """End the exchange for the grid too: what it has not begun is not done, and no late reply comes."""
        if left := [one for one, sent in self.requests.items() if not sent.answered]:
            forget(self._grid, left)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _request(self, payload: Payload, *, again: bool = False) -> tuple[Message, Request] | None:
        """Return the message for `payload` and what is known of it; None if its client cannot be asked."""
        ledger, task, current = self.ledger, payload.task, self.current
        if (node := ledger.nodes.online.get(task.client)) is None or not self._fits(payload, task.client):
            return None
        requests, accepted = ledger.clients.requests, ledger.clients.accepted
        requests[task.client] = requests.get(task.client, 0) + 1
        if ledger.tell:
            ledger.tell("request", {"client": task.client})
        config = {
            **ledger.config,
            **task.config,
            **(described(task.width) if ledger.widths else {}),
            "server-round": current.number,
            "rounds": self.settings.rounds,
            "state": accepted.get(task.client, 0),
            "keep": (accepted if ledger.durable is None else ledger.durable).get(task.client, 0),
            "visit": self.visit,
            **({"base": ledger.base} if ledger.base else {}),
            **{"run": self.settings.run, "round": current.number, "exchange": current.exchange},
        }
        digest, now = digest_of(payload) if ledger.audits else "", time.monotonic()
        ttl = max(self.deadline - now, 1.0)
        message, made = protocol.request(payload, node, config, ttl, packed=ledger.packed, sent=digest)
        made.made, made.repeatable = now, not again
        return message, made

    def _fits(self, payload: Payload, client: int) -> bool:
        """Return whether a client's device can hold the model of `payload`."""
        return not self.ledger.widths or holds(self.ledger.nodes.budget(client), payload.task.width)

    def _sent(self, message_ids: Iterable[str]) -> None:
        """Expect replies to the messages of :meth:`open`; spare clients replace those that were not asked."""
        self._register([sent for _, sent in self._first], message_ids)
        if not self.over:
            self._replace([slot for slot in self.payloads if not self._alive(slot)])

    def _register(self, requests: Iterable[Request], message_ids: Iterable[str]) -> bool:
        """Expect replies to `requests`, sent under these ids; return whether any was sent."""
        before = len(self.requests)
        for message_id, sent in zip(message_ids, requests):
            if message_id:
                self.requests[message_id] = sent
                self.open_slots.setdefault(sent.payload.task.slot, []).append(message_id)
                self.counts.update({"requests": 1, "bytes": sent.down})
                if self.ledger.tell:
                    self.ledger.tell("request_sent", {**self.place, **whom(sent), "bytes_down": sent.down})
        return len(self.requests) > before

    def _send(self, payload: Payload, *, again: bool = False) -> bool:
        """Send one more request; return whether it could be sent."""
        made = self._request(payload, again=again)
        return made is not None and self._register([made[1]], self._grid.push_messages([made[0]]))

    def _take_spare(self, payload: Payload) -> Payload | None:
        """Return `payload` for the first spare client that can hold its model, which is then none any more."""
        for place, client in enumerate(self._spares if not payload.task.fixed else ()):
            if self._fits(payload, client):
                del self._spares[place]
                return replace(payload, task=replace(payload.task, client=client))
        return None

    def _replace(self, slots: Iterable[int]) -> None:
        """Send each lost slot to the next spare client that is connected, as often as ``reassign`` allows."""
        for slot in slots:
            while (
                not self._alive(slot)
                and self._reassigned[slot] < self.settings.reassign
                and time.monotonic() < self.deadline
                and (payload := self._take_spare(self.payloads[slot])) is not None
            ):
                self._reassigned[slot] += 1
                self.counts["spares"] += 1
                self._send(payload)

    def _alive(self, slot: int) -> bool:
        """Return whether the slot is won, or a reply may still win it."""
        return slot in self.won or slot in self.open_slots

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, once, if Flower lost it, or took another node's reply for it; return whether it was."""
        sent = self.requests.get(reply.metadata.reply_to_message_id)
        if sent is None or not sent.repeatable:
            return False
        lost = reply.has_error() and reply.error.code in protocol.LOST_ON_THE_WAY
        foreign = self.settings.nonce and not self._single and not protocol.proves(reply, sent)
        doubtful = self.settings.networked and foreign and reply.metadata.src_node_id != SUPERLINK_NODE_ID
        if not doubtful and not (lost and (self.settings.networked or self.settings.resend_s is not None)):
            return False
        sent.repeatable = False
        return self._send(sent.payload, again=True)

    # ---- replies --------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        enough = min(self.settings.enough_replies or len(self.payloads), len(self.payloads))
        pauses = None if self._single else Pauses(self._grid, self.deadline)
        told = time.monotonic() + min(TOLD_S, (self.deadline - time.monotonic()) / 2)
        while len(self.won) < enough and (waiting := self.waiting):
            replied = False
            parts = [list(self._grid.pull_messages(set(waiting)))] if self._single else None
            for replies in self.ledger.pull(self._grid, waiting) if parts is None else parts:
                replied = replied or bool(replies)
                self.take(replies)
                if len(self.won) >= enough:
                    break
            if (now := time.monotonic()) >= self.deadline:
                break
            if pauses is not None and not replied:
                self.take([])
            if pauses is not None and len(self.won) < enough and self.open_slots:
                pauses.wait(replied)
                if now >= told:
                    told = self.deadline
                    self.ledger.say_waiting(self.current.number, waiting, self.deadline - now)
        self.forget()

    def _settle(self, reply: Message) -> int | None:
        """Accept or reject `reply`; return its slot if the slot is now lost (not won, no open request), else None."""
        sent = self.requests.get(reply.metadata.reply_to_message_id)
        try:
            upload = self._checked(reply, sent)
        except UploadError as error:
            return self._reject(reply, sent, error)
        if self.ledger.tell and sent is not None:
            costs = {"seconds": since(sent), "bytes_up": upload.nbytes}
            self.ledger.tell("reply_accepted", {**self.place, **whom(sent), **costs})
        self.open_slots.pop(upload.slot, None)
        self.accepted(upload)
        self.won[upload.slot] = upload
        return None

    def accepted(self, upload: Upload) -> None:
        """Put an accepted upload into the log of replies, if there is one."""
        if self.ledger.log is not None:
            self.ledger.log.accept(self.current, upload)

    def _checked(self, reply: Message, sent: Request | None) -> Upload:
        """Return the decoded upload in `reply`, or raise an UploadError."""
        if sent is None:
            raise UploadError("unknown", "not an open request")
        task, sender = sent.payload.task, reply.metadata.src_node_id
        if sender not in {sent.node, SUPERLINK_NODE_ID}:
            raise UploadError("wrong_node", f"node {sender} answers for node {sent.node}")
        if sent.answered:
            raise UploadError("duplicate", "answered already")
        if task.slot in self.won:
            raise UploadError("superseded", f"client {self.won[task.slot].client} was faster")
        fields = protocol.check(reply, sent, nonce=self.settings.nonce)
        upload = Upload(client=task.client, slot=task.slot, task=task, **fields)
        digest = digest_of(upload) if self.ledger.audits else ""  # the arrays are still as they were sent
        upload.trace = Trace(sent.node, sent.sent, digest, round(time.monotonic() - sent.made, 4), sent.down)
        for one in reversed(self.ledger.filters):
            upload = one.up(sent.payload, upload)
        sent.answered = True
        return upload

    def _reject(self, reply: Message, sent: Request | None, error: UploadError) -> int | None:
        """Count and tell a rejected reply; return its slot if the slot is now lost."""
        self.ledger.reject(sent.payload.task.client if sent else None, error, self.rejected)
        tell_rejection(self, reply, sent, error)
        if sent is None or (error.reason in FOREIGN and not self._single):
            return None
        sent.answered = True
        slot = sent.payload.task.slot
        return slot if self._drop(reply.metadata.reply_to_message_id, slot) else None

    def _drop(self, message_id: str, slot: int) -> bool:
        """Wait for the reply to one request no longer; return whether its slot is now lost."""
        if message_id in (ids := self.open_slots.get(slot, [])):
            ids.remove(message_id)
            if not ids:
                del self.open_slots[slot]
        return not self._alive(slot)
