"""A model that is out for training, its requests, and how each of them ended: for events and the audit trail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.round.ledger import Ledger, Tell
from fedcross.strategies.wire.protocol import LOST, Payload, Request
from fedcross.strategies.wire.records import raw_digest

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
    visit: int  # under which the client stores its state of it
    place: Round  # in the log of replies
    label: Mapping[str, int]  # its names in events
    deadline: float  # when it is given up, in seconds of time.monotonic
    over: bool = False  # whether the log says that it has ended
    upload: Upload | None = None  # that has won it
    inherited: bool = False  # whether the upload is from the log
    reassigned: int = 0
    sent: dict[str, Request] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # requests, spares among them, bytes of their arrays
    rejected: Counter[str] = field(default_factory=Counter)  # replies by reason
    verdict: str = LOST  # why it is lost


def whom(request: Request) -> dict[str, Any]:
    """Return slot, client and node of a request."""
    return {"slot": request.payload.task.slot, "client": request.payload.task.client, "node": request.node}


def since(request: Request) -> float:
    """Return the seconds since a request was made."""
    return round(time.monotonic() - request.made, 4)


def line_of(verdict: str, request: Request | None = None, **facts: Any) -> dict[str, Any]:
    """Return the audit trail's line of a request that ended so, by default one to which nothing came."""
    line: dict[str, Any] = dict.fromkeys(("slot", "client", "node", "sent", "received"))
    line |= {"verdict": verdict, "seconds": None, "bytes_down": 0, "bytes_up": 0}
    own = {} if request is None else whom(request) | {"sent": request.digest or None, "bytes_down": request.down}
    return line | own | facts


def tell_rejection(
    ledger: Ledger, slot: Slot | None, reply: Message, request: Request | None, error: UploadError
) -> None:
    """Tell that a reply was rejected; without a request nobody knows to which."""
    if (tell := ledger.tell) is None:
        return
    received, size = raw_digest(reply.content) if ledger.audits and reply.has_content() else (None, 0)
    facts = {"received": received, "bytes_up": size, "detail": str(error).partition(": ")[2][:DETAIL]}
    line = line_of(error.reason, request, **facts, seconds=None if request is None else since(request))
    if request is None or error.reason == "wrong_node":
        line["node"] = reply.metadata.src_node_id
    label = {"round": ledger.report.round, **({} if slot is None else slot.label)}
    event = "request_lost" if error.reason == LOST else "reply_rejected"
    tell(event, {**label, "reason": error.reason, **{n: line[n] for n in ("slot", "client", "node", "detail")}})
    tell("request_ended", {**label, **line})


def tell_ends(tell: Tell, slots: Iterable[Slot], refused: Mapping[int, tuple[str, str]]) -> None:
    """Tell how each request of `slots` ended; `refused` is slot -> why its upload did not count, detail."""
    for slot in slots:
        upload, about, lines = slot.upload, slot.payload.task, list[dict[str, Any]]()
        verdict, detail = refused.get(about.slot, (slot.verdict if upload is None else ACCEPTED, ""))
        if upload is not None:
            facts: dict[str, Any] = {"slot": about.slot, "client": upload.client, "bytes_up": upload.nbytes}
            if (trace := upload.trace) is not None:
                facts |= {"node": trace.node, "sent": trace.sent or None, "received": trace.received or None}
                facts |= {"seconds": trace.seconds, "bytes_down": trace.down}
            lines.append(line_of(verdict) | facts | ({"detail": detail[:DETAIL]} if detail else {}))
        elif not slot.sent:
            lines.append(line_of(LOST, slot=about.slot, client=about.client, detail=NOT_ASKED))
        for request in (one for one in slot.sent.values() if not one.answered):
            silent = {"detail": f"no reply in {since(request):.0f} s, when the exchange ended"}
            lines.append(line_of(LOST, request, **silent) if upload is None else line_of(NOT_NEEDED, request))
        if verdict != ACCEPTED:
            lost = {"slot": about.slot, "client": about.client, "reason": verdict}
            tell("slot_lost", {**slot.label, **lost})
        for line in lines:
            tell("request_ended", {**slot.label, **line})
