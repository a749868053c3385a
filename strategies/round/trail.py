"""How every request of an exchange ended, for live events and the audit trail; made only where somebody listens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.protocol import LOST, Request
from fedcross.strategies.wire.records import raw_digest

if TYPE_CHECKING:
    from fedcross.strategies.round.exchange import Exchange

#: How a request ended, besides the reasons of a rejection.
ACCEPTED, NOT_NEEDED = "accepted", "not_needed"
NOT_ASKED = "not asked: not connected, too slow for the deadline, or given up before the server was started again"
#: Most characters of a rejected reply's detail that are kept.
DETAIL = 200


def whom(sent: Request) -> dict[str, Any]:
    """Return slot, client and node of a request."""
    return {"slot": sent.payload.task.slot, "client": sent.payload.task.client, "node": sent.node}


def since(sent: Request) -> float:
    """Return the seconds since a request was made."""
    return round(time.monotonic() - sent.made, 4)


def line_of(verdict: str, sent: Request | None = None, **facts: Any) -> dict[str, Any]:
    """Return the line of a request that ended so, by default one to which nothing came."""
    costs = {"seconds": None, "bytes_down": 0, "bytes_up": 0}
    line = {**dict.fromkeys(("slot", "client", "node", "sent", "received")), "verdict": verdict, **costs}
    return line | ({} if sent is None else whom(sent) | {"sent": sent.sent or None, "bytes_down": sent.down}) | facts


def never_asked(slot: int, client: int) -> dict[str, Any]:
    """Return the line of a slot whose client this process did not ask: not connected, or too slow for the deadline."""
    return line_of(LOST, slot=slot, client=client, detail=NOT_ASKED)


def tell_rejection(exchange: Exchange, reply: Message, sent: Request | None, error: UploadError) -> None:
    """Tell that a reply was rejected; without a request nobody knows to which."""
    if (tell := exchange.ledger.tell) is None:
        return
    received, size = raw_digest(reply.content) if exchange.ledger.audits and reply.has_content() else (None, 0)
    detail = str(error).partition(": ")[2][:DETAIL]
    seconds = None if sent is None else since(sent)
    line = line_of(error.reason, sent, received=received, detail=detail, seconds=seconds, bytes_up=size)
    if sent is None or error.reason == "wrong_node":
        line["node"] = reply.metadata.src_node_id
    exchange.rejections.append(line)
    facts = {name: line[name] for name in ("slot", "client", "node", "detail")}
    event = "request_lost" if error.reason == LOST else "reply_rejected"
    tell(event, {**exchange.place, **facts, "reason": error.reason})


def tell_ends(exchange: Exchange, overruled: Mapping[int, tuple[str, str]] | None = None) -> None:
    """Tell how each request of `exchange` ended; `overruled` is slot -> why its upload did not count, detail."""
    overruled, tell = overruled or {}, exchange.ledger.tell
    if tell is None:
        return
    found = list(exchange.rejections)
    for slot, upload in sorted(exchange.won.items()):
        verdict, detail = overruled.get(slot, (ACCEPTED, ""))
        line = line_of(verdict, slot=slot, client=upload.client, bytes_up=upload.nbytes)
        if (trace := upload.trace) is not None:
            line |= {"node": trace.node, "sent": trace.sent or None, "received": trace.received or None}
            line |= {"seconds": trace.seconds, "bytes_down": trace.down}
        found.append(line | ({"detail": detail[:DETAIL]} if detail else {}))
    for sent in (one for one in exchange.requests.values() if not one.answered):
        silent = {"detail": f"no reply in {since(sent):.0f} s, when the exchange ended"}
        won = sent.payload.task.slot in exchange.won
        found.append(line_of(NOT_NEEDED, sent) if won else line_of(LOST, sent, **silent))
    named = {line["slot"] for line in found}
    found += [never_asked(slot, one.task.client) for slot, one in exchange.payloads.items() if slot not in named]
    reasons = {line["slot"]: line["verdict"] for line in found} | {slot: why for slot, (why, _) in overruled.items()}
    for slot, payload in exchange.payloads.items():
        if slot not in exchange.won or slot in overruled:
            lost = {"slot": slot, "client": payload.task.client, "reason": reasons[slot]}
            tell("slot_lost", {**exchange.place, **lost})
    for line in found:
        tell("request_ended", {**exchange.place, **line})
