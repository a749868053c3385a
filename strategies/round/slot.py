"""A model that is out for training, its requests, and how each of them ended: for events and the audit trail."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.wire.records import LOST, Payload, Request, groups_of

#: Receives the name of an event (:data:`core.events.EVENTS`, ``request``, ``request_ended``, ``uploads`` or
#: ``visit_ended``) and its fields.
Tell = Callable[[str, Mapping[str, Any]], None]
#: How a request ended, besides the reasons of a rejection.
ACCEPTED, NOT_NEEDED = "accepted", "not_needed"
NOT_ASKED = "not asked: not connected, too slow for the deadline, or given up before the server was started again"
#: Most characters of a rejected reply's detail that are kept.
DETAIL = 200


@dataclass(eq=False)
class Slot:
    """One model that is out for training, until a reply has won it or none can any more.

    `sent` are all requests of this process by message id, `waiting` those whose reply may still win.
    """

    payload: Payload
    current: Round
    place: Round  # in the log of replies
    label: Mapping[str, int] = field(default_factory=dict)  # its names in events
    visit: int = 0  # under which the client stores its state of it
    deadline: float = 0.0  # when it is given up, in seconds of time.monotonic
    over: bool = False  # whether the log says that it has ended
    upload: Upload | None = None  # that has won it
    inherited: bool = False  # whether the upload is from the log
    reassigned: int = 0
    sent: dict[str, Request] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # requests, spares among them, bytes of their arrays
    rejected: Counter[str] = field(default_factory=Counter)  # replies by reason
    verdict: str = LOST  # why it is lost


@dataclass
class Events:
    """Tells what becomes of requests; `audits` says whether their digests are wanted."""

    tell: Tell
    audits: bool = False

    def made(self, request: Request) -> None:
        """Tell that a client will be asked, and note the digest of what it is sent."""
        self.tell("request", {"client": request.payload.task.client})
        request.digest = digest_of(request.payload) if self.audits else ""

    def sent(self, slot: Slot, request: Request) -> None:
        """Tell that a request is on its way."""
        self.tell("request_sent", {**slot.label, **_whom(request), "bytes_down": request.down})

    def accepted(self, slot: Slot, request: Request, upload: Upload) -> None:
        """Tell that a reply has won its slot."""
        costs = {"seconds": since(request), "bytes_up": upload.nbytes}
        self.tell("reply_accepted", {**slot.label, **_whom(request), **costs})

    def rejected(self, label: Mapping[str, int], reply: Message, request: Request | None, error: UploadError) -> None:
        """Tell that a reply was rejected; without a request nobody knows to which."""
        received, size = raw_digest(reply) if self.audits else (None, 0)
        facts = {"received": received, "bytes_up": size, "detail": str(error).partition(": ")[2][:DETAIL]}
        line = _line(error.reason, request, **facts, seconds=None if request is None else since(request))
        if request is None or error.reason == "wrong_node":
            line["node"] = reply.metadata.src_node_id
        known = {name: line[name] for name in ("slot", "client", "node", "detail")}
        event = "request_lost" if error.reason == LOST else "reply_rejected"
        self.tell(event, {**label, "reason": error.reason, **known})
        self.tell("request_ended", {**label, **line})

    def ended(self, slots: Iterable[Slot], refused: Mapping[int, tuple[str, str]]) -> None:
        """Tell how each request of `slots` ended; `refused` is slot -> why its upload did not count, detail."""
        for slot in slots:
            upload, about, lines = slot.upload, slot.payload.task, list[dict[str, Any]]()
            verdict, detail = refused.get(about.slot, (slot.verdict if upload is None else ACCEPTED, ""))
            if upload is not None:
                facts: dict[str, Any] = {"slot": about.slot, "client": upload.client, "bytes_up": upload.nbytes}
                if (trace := upload.trace) is not None:
                    facts |= {"node": trace.node, "sent": trace.sent or None, "received": trace.received or None}
                    facts |= {"seconds": trace.seconds, "bytes_down": trace.down}
                lines.append(_line(verdict) | facts | ({"detail": detail[:DETAIL]} if detail else {}))
            elif not slot.sent:
                lines.append(_line(LOST, slot=about.slot, client=about.client, detail=NOT_ASKED))
            for request in (one for one in slot.sent.values() if not one.answered):
                silent = {"detail": f"no reply in {since(request):.0f} s, when the exchange ended"}
                lines.append(_line(LOST, request, **silent) if upload is None else _line(NOT_NEEDED, request))
            if verdict != ACCEPTED:
                lost = {"slot": about.slot, "client": about.client, "reason": verdict}
                self.tell("slot_lost", {**slot.label, **lost})
            for line in lines:
                self.tell("request_ended", {**slot.label, **line})


def _whom(request: Request) -> dict[str, Any]:
    return {"slot": request.payload.task.slot, "client": request.payload.task.client, "node": request.node}


def since(request: Request) -> float:
    """Return the seconds since a request was made."""
    return round(time.monotonic() - request.made, 4)


def _line(verdict: str, request: Request | None = None, **facts: Any) -> dict[str, Any]:
    """Return the audit trail's line of a request that ended so, by default one to which nothing came."""
    line: dict[str, Any] = dict.fromkeys(("slot", "client", "node", "sent", "received"))
    line |= {"verdict": verdict, "seconds": None, "bytes_down": 0, "bytes_up": 0}
    own = {} if request is None else _whom(request) | {"sent": request.digest or None, "bytes_down": request.down}
    return line | own | facts


def digest_of(content: Payload | Upload) -> str:
    """Return the SHA-256 of all arrays of a payload or upload, with their groups, names, shapes and dtypes.

    It is the same however a message is packed.
    """
    extras, found = content.task.extras if isinstance(content, Payload) else content.extras, hashlib.sha256()
    for group, arrays in sorted(groups_of(content.arrays, extras, content.scales).items()):
        for name, array in sorted(arrays.items()):
            found.update(f"{group}\0{name}\0{array.dtype}\0{array.shape}\n".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def raw_digest(reply: Message) -> tuple[str | None, int]:
    """Return the SHA-256 of a reply's arrays as they came, which may be malformed, and how many bytes they have."""
    found, size = hashlib.sha256(), 0
    if not reply.has_content():
        return None, 0
    for record, arrays in sorted(reply.content.array_records.items()):
        for name, array in sorted(arrays.items()):
            found.update(f"{record}\0{name}\n".encode(errors="replace"))
            if isinstance(array.data, bytes):
                found.update(array.data)
                size += len(array.data)
    return found.hexdigest(), size
