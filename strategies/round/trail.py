"""How every request of an exchange ended: the content of the audit trail (:mod:`server.audit`), and of live events.

Each request ends in one way: its reply is ``accepted``; a reply is rejected, with the guard's reason; nothing came and
the slot has no upload, or the SuperLink says that it has no reply (``lost``); or nothing was needed any more, because
another client had won the slot (``not_needed``). A further reply to the same request is a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Message

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.digest import digest_of, raw_digest
from fedcross.strategies.wire.protocol import Payload, Ticket, Trace, Upload

#: Verdicts that are no reason of the guard.
ACCEPTED, LOST, NOT_NEEDED = "accepted", "lost", "not_needed"
#: What is said of a lost slot whose client was not asked.
NOT_ASKED = "not asked: not connected, too slow for the deadline, or given up before the server was started again"
#: Most characters of a rejected reply's detail that are kept.
DETAIL = 200
#: Receives the name of an event and its fields.
Tell = Callable[[str, dict[str, Any]], None]


class Trail:
    """The requests of one exchange.

    Parameters
    ----------
    place : mapping
        Where the exchange stands in the run (``round`` and ``exchange``, or ``visit``); part of every line.
    tell : callable, optional
        Gets an event when a request is sent, and when a reply is accepted or rejected.
    digests : bool
        Whether digests of what was received are computed.
    """

    def __init__(self, place: Mapping[str, int], tell: Tell | None = None, digests: bool = False) -> None:
        self.place = dict(place)
        self._tell, self._digests = tell, digests
        self._unanswered: dict[str, Ticket] = {}
        self._rejected: list[dict[str, Any]] = []

    def asked(self, tickets: Mapping[str, Ticket]) -> None:
        """Note that these requests were sent: message id -> ticket."""
        self._unanswered.update(tickets)
        for ticket in tickets.values():
            self._say("request_sent", **_whom(ticket), bytes_down=ticket.down)

    def trace(self, ticket: Ticket, upload: Upload) -> None:
        """Give `upload` its trace; its arrays are still as they were sent."""
        received = digest_of(upload) if self._digests else ""
        upload.trace = Trace(ticket.node, ticket.sent, received, _since(ticket), ticket.down)

    def accepted(self, asked: str, ticket: Ticket, upload: Upload) -> None:
        """Note that `upload` has won its slot."""
        self._unanswered.pop(asked, None)
        self._say("reply_accepted", **_whom(ticket), seconds=_since(ticket), bytes_up=upload.nbytes)

    def rejected(
        self, asked: str, ticket: Ticket | None, reply: Message, error: UploadError, *, final: bool = True
    ) -> None:
        """Note a rejected reply; without a ticket nobody knows whose it is. A `final` one ends its request."""
        if final:
            self._unanswered.pop(asked, None)
        foreign = ticket is None or error.reason == "wrong_node"
        whole = self._digests and reply.has_content()
        received, size = raw_digest(reply.content) if whole else (None, 0)
        whom = {"slot": None, "client": None} if ticket is None else _whom(ticket)
        line = {
            **whom,
            "node": reply.metadata.src_node_id if foreign or ticket is None else ticket.node,
            "sent": None if ticket is None else ticket.sent or None,
            "received": received,
            "verdict": error.reason,
            "detail": str(error).partition(": ")[2][:DETAIL],
            "seconds": None if ticket is None else _since(ticket),
            "bytes_down": 0 if ticket is None else ticket.down,
            "bytes_up": size,
        }
        self._rejected.append(line)
        event = "request_lost" if error.reason == LOST else "reply_rejected"
        self._say(event, **{**whom, "reason": error.reason, "detail": line["detail"]})

    def lines(
        self,
        payloads: Sequence[Payload],
        won: Mapping[int, Upload],
        overruled: Mapping[int, str],
        seen: Mapping[int, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return a line for every request of the exchange, which has ended.

        Parameters
        ----------
        payloads : sequence of Payload
            One for each slot.
        won : mapping of int to Upload
            Slot -> the upload that won it.
        overruled : mapping of int to str
            Slot -> why its upload did not count in the end (``quarantined``, ``too_few``).
        seen : mapping of int to str, optional
            Slot -> what was seen of such an upload; part of its line as ``detail``.
        """
        found, details = list(self._rejected), seen or {}
        for slot, upload in sorted(won.items()):
            line = _accepted(upload, overruled.get(slot, ACCEPTED))
            found.append({**line, "detail": details[slot][:DETAIL]} if slot in details else line)
        for ticket in self._unanswered.values():
            verdict = NOT_NEEDED if ticket.expected.slot in won else LOST
            line = {**_nothing(verdict), **_whom(ticket), "sent": ticket.sent or None, "bytes_down": ticket.down}
            silent = {"detail": f"no reply in {_since(ticket):.0f} s, when the exchange ended"}
            found.append(line | silent if verdict == LOST else line)
        named = {line["slot"] for line in found}
        # Nobody could be asked, or the process before this one had given it up.
        found.extend(never_asked(one.slot, one.client) for one in payloads if one.slot not in named)
        reasons = {line["slot"]: line["verdict"] for line in found}
        for payload in payloads:
            slot = payload.slot
            if slot not in won or slot in overruled:
                self._say("slot_lost", slot=slot, client=payload.client, reason=overruled.get(slot, reasons[slot]))
        return [{**self.place, **line} for line in found]

    def _say(self, name: str, **fields: Any) -> None:
        if self._tell is not None:
            self._tell(name, {**self.place, **fields})


def never_asked(slot: int, client: int) -> dict[str, Any]:
    """Return the line of a slot whose client this process did not ask: not connected, or too slow for the deadline."""
    return {**_nothing(LOST), "slot": slot, "client": client, "detail": NOT_ASKED}


def _whom(ticket: Ticket) -> dict[str, Any]:
    return {"slot": ticket.expected.slot, "client": ticket.expected.client, "node": ticket.node}


def _since(ticket: Ticket) -> float:
    return round(time.monotonic() - ticket.made, 4)


def _accepted(upload: Upload, verdict: str) -> dict[str, Any]:
    trace = vars(upload.trace) if upload.trace is not None else {}  # none: a log of version 0.2
    return {
        **_nothing(verdict),
        "slot": upload.slot,
        "client": upload.client,
        "node": trace.get("node"),
        "sent": trace.get("sent") or None,
        "received": trace.get("received") or None,
        "seconds": trace.get("seconds"),
        "bytes_down": trace.get("down", 0),
        "bytes_up": upload.nbytes,
    }


def _nothing(verdict: str) -> dict[str, Any]:
    """Return the line of a request to which nothing came."""
    names = ("slot", "client", "node", "sent", "received")
    costs = {"seconds": None, "bytes_down": 0, "bytes_up": 0}
    return {**dict.fromkeys(names), "verdict": verdict, **costs}
