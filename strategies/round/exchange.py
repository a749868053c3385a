"""The open requests of a run and their replies: spare clients, repeats, deadlines, the check of every reply.

A *slot* is one model that a method sends out for training (a row of the pool, say). Its first valid reply wins it. The
server can send the slot of a failed client to a spare one (``reassign``), the least recently trained slots to two from
the start (``hedge``), and a request without a reply once more (``resend_s``). A nonce links each reply to its request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Round, Trace, Upload
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.nodes import forget, pause
from fedcross.strategies.round.slot import Slot, digest_of
from fedcross.strategies.wire import records
from fedcross.strategies.wire.records import SUPERLINK_NODE_ID, Payload, Request

#: Reasons for which the server still waits: the reply came from another node or answers another request.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Seconds after which the server says for which slots it waits.
TOLD_S = 60.0


class Exchange:
    """Slots whose replies are awaited together: those of one exchange, or all visits of an asynchronous run.

    `accepted` is called with an accepted upload before the log gets it, and `lost` with a slot that no reply can win
    any more.
    """

    def __init__(
        self, ledger: Ledger, grid: Grid, accepted: Callable[[Upload], None] | None = None,
        lost: Callable[[Slot], None] | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self.settings, self.grid = ledger, ledger.settings, grid
        self.slots, self.requests = dict[int, Slot](), dict[str, Request]()  # by number, by message id
        self._spares, self._accepted, self._lost = list[int](), accepted, lost
        self._single: bool = getattr(grid, "blocking", False)  # whether every request has exactly one reply

    def add(
        self, current: Round, payloads: Sequence[Payload], visit: int, spares: Sequence[int] = (),
        place: Round | None = None, label: Mapping[str, int] | None = None, deadline_s: float | None = None,
    ) -> list[tuple[Message, Request]]:  # fmt: skip
        """Add a slot for each payload, the least recently trained first, and return the first requests.

        There is none for a slot that the log has, and a second one for hedged slots. `spares` are clients that may take
        over a slot, in the order of asking. `place` is that in the log, by default `current`; `label` names the slots
        in events.
        """
        replies, place = self.ledger.log, place or current
        deadline = time.monotonic() + (deadline_s or self.settings.deadline_s)
        label = label or {"round": current.number, "exchange": current.exchange}
        over, before = False, dict[int, Upload]()
        if replies is not None:
            over, before = replies.is_over(place), self.ledger.logged(replies, place, payloads)
        self._spares = [client for client in spares if client not in {upload.client for upload in before.values()}]
        missing = []
        for payload in payloads:
            upload = before.get(payload.task.slot)
            slot = Slot(payload, current, place, label, visit, deadline, over, upload, upload is not None)
            self.slots[payload.task.slot] = slot
            if over or slot.inherited:  # asked by the process before this one
                slot.counts.update({"requests": 1, "bytes": payload.nbytes})
            else:
                missing.append(payload)
        hedges = [one for payload in missing[: self.settings.hedge] if (one := self._take_spare(payload)) is not None]
        return [pair for payload in (*missing, *hedges) if (pair := self._request(payload)) is not None]

    def send(self, first: Sequence[tuple[Message, Request]], slots: Iterable[int]) -> None:
        """Send the `first` requests, which :meth:`add` has returned, of these slots."""
        ids = self.grid.push_messages([message for message, _ in first]) if first else []
        self.expect([request for _, request in first], ids, slots)

    def expect(self, first: Iterable[Request], message_ids: Iterable[str], slots: Iterable[int]) -> None:
        """Expect replies to the `first` requests of `slots`; spare clients replace those that were not asked."""
        self._register(first, message_ids)
        for number in slots:
            self._replace(self.slots[number])

    def carry_out(
        self, current: Round, payloads: Sequence[Payload], visit: int, spares: Sequence[int] = ()
    ) -> list[Slot]:
        """Add these slots, send their requests, collect the replies and return the slots, ended."""
        self.send(self.add(current, payloads, visit, spares), list(self.slots))
        self.collect()
        return self.end()

    def hand_in(self, first: Mapping[str, Request], replies: Iterable[Message]) -> list[Slot]:
        """Continue as :meth:`carry_out` with `replies`, all that a caller has got to the `first` requests."""
        self.expect(first.values(), first, list(self.slots))
        self.take(replies)
        self._drop(first)
        self.collect()
        return self.end()

    def take(self, replies: Iterable[Message]) -> None:
        """Accept or reject `replies`; send lost slots to spare clients and repeat requests that are overdue."""
        for reply in replies:
            if (slot := self._settle(reply)) is not None and not self._repeat_lost(reply):
                self._replace(slot)
        if excluded := self.ledger.nodes.excluded:
            self._drop([one for one, request in self._waiting().items() if request.node in excluded])
        if (patience := self.settings.resend_s) is None:
            return
        now = time.monotonic()
        for request in self._waiting().values():
            slot = self.slots[request.payload.task.slot]
            if request.repeatable and request.made <= now - patience and now < slot.deadline:
                request.repeatable = False
                self._send(request.payload, again=True)

    def collect(self, done: Callable[[], bool] | None = None) -> None:
        """Take replies until `done` says so, by default when enough slots are won, or until none can come any more."""
        enough = min(self.settings.enough_replies or len(self.slots), len(self.slots))
        done = done or (lambda: sum(slot.upload is not None for slot in self.slots.values()) >= enough)
        replies_log = self.ledger.log if self.settings.networked else None
        last = began = time.monotonic()
        while not done() and (waiting := self._waiting()):
            if replies_log is None:
                pulled: Iterable[Iterable[Message]] = [self.grid.pull_messages(set(waiting))]
            else:
                pulled = self.ledger.pull(replies_log, self.grid, waiting)
            for replies in map(list, pulled):
                last = time.monotonic() if replies else last
                self.take(replies)
                if done():
                    return
            if not self._single:
                self.take([])
            now = time.monotonic()
            self._drop([o for o, r in self._waiting().items() if self.slots[r.payload.task.slot].deadline <= now])
            if not self._single and (waiting := self._waiting()):
                deadline = min(self.slots[request.payload.task.slot].deadline for request in waiting.values())
                pause(last, deadline)
                began = self._say(waiting, deadline) if now - began >= TOLD_S else began

    def _say(self, waiting: Mapping[str, Request], deadline: float) -> float:
        """Log for whom an exchange waits; return `deadline`: it is said once."""
        tasks = [request.payload.task for request in waiting.values()]
        found = ", ".join(sorted(f"{task.slot} (client {task.client})" for task in tasks)[:10])
        log(INFO, "fedcross: round %d waits for %d slots, %s, for %.0f s at most (federation.deadline_s)",
            self.ledger.report.round, len(tasks), found, deadline - time.monotonic())  # fmt: skip
        return deadline

    def end(self, *numbers: int) -> list[Slot]:
        """Take these slots out, by default all: the grid drops what it has not begun, and late replies are unknown."""
        ended = [self.slots.pop(one) for one in numbers or tuple(self.slots) if one in self.slots]
        sent = {one: self.requests.pop(one) for slot in ended for one in slot.sent}
        if left := [one for one, request in sent.items() if not request.answered]:
            forget(self.grid, left)
        return ended

    # ---- requests -------------------------------------------------------------------------------------------------

    def _request(self, payload: Payload, *, again: bool = False) -> tuple[Message, Request] | None:
        """Return the message for `payload` and what is known of it; None if its client cannot be asked."""
        ledger, task, slot = self.ledger, payload.task, self.slots[payload.task.slot]
        if (node := ledger.nodes.online.get(task.client)) is None or not self._fits(payload, task.client):
            return None
        requests, accepted = ledger.clients.requests, ledger.clients.accepted
        requests[task.client] = requests.get(task.client, 0) + 1
        at, keep = slot.current, accepted if ledger.durable is None else ledger.durable
        place = {"server-round": at.number, "round": at.number, "exchange": at.exchange, "rounds": self.settings.rounds}
        state = {"visit": slot.visit, "state": accepted.get(task.client, 0), "keep": keep.get(task.client, 0)}
        width = described(task.width) if ledger.widths else {}
        optional = {"base": ledger.base} if ledger.base else {}
        config = {**ledger.config, **task.config, **width, **optional, **place, **state, "run": self.settings.run}
        ttl = max(slot.deadline - time.monotonic(), 1.0)
        message, made = records.request(payload, node, config, ttl, packed=ledger.packed)
        made.made, made.repeatable = time.monotonic(), not again
        if ledger.events:
            ledger.events.made(made)
        return message, made

    def _fits(self, payload: Payload, client: int) -> bool:
        """Return whether a client's device can hold the model of `payload`."""
        return not self.ledger.widths or holds(self.ledger.nodes.budget(client), payload.task.width)

    def _register(self, requests: Iterable[Request], message_ids: Iterable[str]) -> bool:
        """Expect replies to `requests`, sent under these ids; return whether any was sent."""
        before = len(self.requests)
        for message_id, request in zip(message_ids, requests):
            if message_id:
                slot = self.slots[request.payload.task.slot]
                self.requests[message_id] = slot.sent[message_id] = slot.waiting[message_id] = request
                spare = request.repeatable and request.payload.task.client != slot.payload.task.client
                slot.counts.update({"requests": 1, "bytes": request.down, "spares": spare})
                if self.ledger.events:
                    self.ledger.events.sent(slot, request)
        return len(self.requests) > before

    def _send(self, payload: Payload, *, again: bool = False) -> bool:
        """Send one more request; return whether it could be sent."""
        made = self._request(payload, again=again)
        return made is not None and self._register([made[1]], self.grid.push_messages([made[0]]))

    def _take_spare(self, payload: Payload) -> Payload | None:
        """Return `payload` for the first spare client that can hold its model, which is then none any more."""
        for place, client in enumerate(self._spares if not payload.task.fixed else ()):
            if self._fits(payload, client):
                del self._spares[place]
                return replace(payload, task=replace(payload.task, client=client))
        return None

    def _replace(self, slot: Slot) -> None:
        """Send a slot that is lost to the next spare client that is connected, as often as ``reassign`` allows."""
        while _is_lost(slot) and slot.reassigned < self.settings.reassign and time.monotonic() < slot.deadline:
            if (payload := self._take_spare(slot.payload)) is None:
                break
            slot.reassigned += self._send(payload)
        if self._lost and _is_lost(slot):
            self._lost(slot)

    def _drop(self, message_ids: Iterable[str]) -> None:
        """Wait for the replies to these requests no longer."""
        for one in message_ids:
            slot = self.slots[self.requests[one].payload.task.slot] if one in self.requests else None
            if slot is not None and slot.waiting.pop(one, None) is not None:
                self._replace(slot)

    def _repeat_lost(self, reply: Message) -> bool:
        """Repeat the request, once, if Flower lost it, or took another node's reply for it; return whether it was."""
        request, networked = self.requests[reply.metadata.reply_to_message_id], self.settings.networked
        if not request.repeatable:
            return False
        lost = reply.has_error() and reply.error.code in records.LOST_ON_THE_WAY
        foreign = self.settings.nonce and networked and not records.proves(reply, request)
        doubtful = foreign and reply.metadata.src_node_id != SUPERLINK_NODE_ID
        if not (doubtful or (lost and (networked or self.settings.resend_s is not None))):
            return False
        request.repeatable = False
        return self._send(request.payload, again=True)

    # ---- replies --------------------------------------------------------------------------------------------------

    def _waiting(self) -> dict[str, Request]:
        """Return message id -> the requests whose reply may still win."""
        return {one: sent for slot in self.slots.values() for one, sent in slot.waiting.items()}

    def _settle(self, reply: Message) -> Slot | None:
        """Accept or reject `reply`; return its slot if this has lost it, else None."""
        ledger, message_id = self.ledger, reply.metadata.reply_to_message_id
        request = self.requests.get(message_id)
        slot = None if request is None else self.slots[request.payload.task.slot]
        try:
            if request is None or slot is None:
                raise UploadError("unknown", "not an open request")
            slot.upload = upload = self._checked(reply, request, slot)
        except UploadError as error:
            client = None if request is None else request.payload.task.client
            ledger.reject(client, error, ledger.report.rejected if slot is None else slot.rejected)
            if ledger.events:
                label = {"round": ledger.report.round} if slot is None else slot.label
                ledger.events.rejected(label, reply, request, error)
            if request is None or slot is None or (error.reason in FOREIGN and not self._single):
                return None
            request.answered, slot.verdict = True, error.reason
            return slot if slot.waiting.pop(message_id, None) is not None and _is_lost(slot) else None
        if ledger.events:
            ledger.events.accepted(slot, request, upload)
        slot.waiting.clear()
        if self._accepted:
            self._accepted(upload)
        if ledger.log is not None:
            ledger.log.accept(slot.place, upload)
        return None

    def _checked(self, reply: Message, request: Request, slot: Slot) -> Upload:
        """Return the decoded upload in `reply`, or raise an UploadError."""
        task, sender, ledger = request.payload.task, reply.metadata.src_node_id, self.ledger
        if sender not in {request.node, SUPERLINK_NODE_ID}:
            raise UploadError("wrong_node", f"node {sender} answers for node {request.node}")
        if request.answered:
            raise UploadError("duplicate", "answered already")
        if slot.upload is not None:
            raise UploadError("superseded", f"client {slot.upload.client} was faster")
        upload = Upload(task.client, task.slot, **records.check(reply, request, nonce=self.settings.nonce), task=task)
        digest = digest_of(upload) if ledger.events and ledger.events.audits else ""  # of the arrays as they were sent
        seconds = round(time.monotonic() - request.made, 4)
        upload.trace = Trace(request.node, request.digest, digest, seconds, request.down)
        for one in reversed(ledger.filters):
            upload = one.up(request.payload, upload)
        request.answered = True
        return upload


def _is_lost(slot: Slot) -> bool:
    """Return whether no reply has won a slot of this process, and none can any more."""
    return slot.upload is None and not slot.waiting and not slot.over
