"""What a round cost and brought: its report, its events, and a line on how every request ended."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.common.logger import log

from fedcross.core.errors import ConfigError, FederationError, UploadError, one_line
from fedcross.strategies.method import Upload
from fedcross.strategies.wire.digest import digest_of, raw_digest
from fedcross.strategies.wire.protocol import Payload, Ticket
from fedcross.tasks.scoring import spread

#: How a request ended, besides the guard's reasons.
ACCEPTED, LOST, NOT_NEEDED = "accepted", "lost", "not_needed"
NOT_ASKED = "not asked: not connected, too slow for the deadline, or given up before the server was started again"
#: Most slots that one line of the log names.
MOST_NAMED = 10
#: Most characters of a rejected reply's detail, and of a device's words, that are kept.
DETAIL, LONGEST = 200, 300
#: The type of a client's error, and its words.
CLIENT_ERROR = re.compile(r"client_error: (?:code \d+: )?(\w+): (.*)", re.DOTALL)
#: Events that only those get who name them.
DETAILED = frozenset({"request", "request_ended", "uploads", "visit_ended"})
#: Receives the name of an event and its fields.
Tell = Callable[[str, Mapping[str, Any]], None]


def silent(event: str, fields: Mapping[str, Any]) -> None:
    """Tell nobody."""


@dataclass
class RoundReport:
    """Costs and metrics of one global round; they become one line of ``metrics.jsonl``."""

    round: int
    clients: int = 0
    dropped: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    clipped: int = 0
    lightened: int = 0
    spares: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    train_loss: float | None = None
    seconds_training: float = 0.0
    seconds_aggregation: float = 0.0
    #: Width -> accepted replies, of the widths that went out; only where models have several.
    width_replies: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)


class Ledger:
    """The report of the current round, and whom to tell what happens in it.

    Parameters
    ----------
    tell : callable
        Gets the events of :data:`core.events.EVENTS` that concern requests, and ``request``, ``request_ended``,
        ``visit_ended`` and ``uploads``.
    watches : collection of str
        Events that somebody wants; ``events`` stands for all of :data:`core.events.EVENTS`.
    local : bool
        Whether the clients run on this machine, and their exceptions have been printed.
    """

    def __init__(self, tell: Tell = silent, watches: Collection[str] = (), *, local: bool = False) -> None:
        self._tell, self.watches, self.local = tell, frozenset(watches), local
        self.audits = "request_ended" in self.watches
        self.report = RoundReport(0)
        self._faults: dict[int, tuple[str, str]] = {}  # client -> type and words of its error in this exchange
        self._said: set[tuple[int, int, str]] = set()  # client, round and words of earlier ones
        self.heard = False  # whether a client has trained since this process began
        self._digests: dict[tuple[int, ...], tuple[Payload, str]] = {}

    def begin(self, number: int) -> None:
        """Start the report of round `number`."""
        self.report = RoundReport(number)

    def say(self, event: str, **fields: Any) -> None:
        """Tell an event to whoever watches it."""
        if event in self.watches or ("events" in self.watches and event not in DETAILED):
            self._tell(event, fields)

    def digest(self, payload: Payload) -> str:
        """Return the digest of `payload` for the audit trail; computed once for clients that get the same."""
        key = id(payload.arrays), *map(id, payload.task.extras.values()), id(payload.scales) if payload.scales else 0
        if key not in self._digests:
            self._digests[key] = payload, digest_of(payload)  # with the payload, so that no other gets its id
        return self._digests[key][1]

    def forget_digests(self) -> None:
        """End an exchange."""
        self._digests = {}

    def say_waiting(self, number: int, tickets: Iterable[Ticket], left_s: float) -> None:
        """Log which slots a round that takes long waits for, and until when."""
        found = sorted((ticket.expected.slot, ticket.expected.client) for ticket in tickets)
        named = ", ".join(f"slot {slot} (client {client})" for slot, client in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        end = datetime.now().astimezone() + timedelta(seconds=min(left_s, 3e8))
        if found:
            log(INFO, "fedcross: round %d waits for %s%s, until %s at the latest (federation.deadline_s)",
                number, named, more, f"{end:%Y-%m-%d %H:%M:%S %Z}")  # fmt: skip

    # ---- replies --------------------------------------------------------------------------------------------------

    def rejected(self, client: int | None, error: UploadError, counts: Counter[str]) -> None:
        """Count a rejected reply in `counts`, keep what its client says of the configuration, and log it."""
        who = "unknown sender" if client is None else f"client {client}"
        if error.reason == LOST:
            log(WARNING, "fedcross: request to %s %s", who, error)
        else:
            counts[error.reason] += 1
            log(WARNING, "fedcross: reply of %s rejected, %s", who, error)
        if client is not None and (found := CLIENT_ERROR.match(str(error))):
            self._faults[client] = found[1], found[2]

    def end_if_common(self, asked: Collection[int], number: int, connected: int, *, answered: bool) -> None:
        """End the run if all clients that were asked failed alike, so that no later round could do better.

        One client's word is not enough where a round asks one only, nor that of a few once others have trained.

        Raises
        ------
        ConfigError
            If all refuse the configuration with the same words.
        FederationError
            If the clients are local ones, nobody has trained yet, and all raised an exception of one type.
        """
        faults, self._faults = self._faults, {}
        self.heard = self.heard or answered
        if answered or not faults:
            return
        kinds, common = {kind for kind, _ in faults.values()}, set(asked) <= faults.keys()
        kind, fault = next(iter(faults.values()))
        words = one_line(fault)[:LONGEST]
        if kinds != {"ConfigError"}:
            if self.local and common and len(kinds) == 1 and not self.heard:
                raise FederationError(
                    f"All {len(faults)} clients of round {number} failed alike: {kind}: {words}. The traceback of the "
                    "first one is above."
                )
            return
        self._said |= {(client, number, words) for client, (_, words) in faults.items()}
        few = self.heard and 2 * len(faults) <= connected
        if common and not few and len(set(faults.values())) == 1 and sum(one == fault for *_, one in self._said) >= 2:
            raise ConfigError(f"All {len(asked)} clients of round {number} refuse: {words} (their devices' words)")

    def uploaded(self, uploads: list[Upload], *, local: bool) -> None:
        """Count the uploads that are aggregated; `local` is whether their local accuracies are due."""
        report = self.report
        report.bytes_up += sum(upload.nbytes for upload in uploads)
        losses = [(u.metrics["train-loss"], u.num_examples) for u in uploads if "train-loss" in u.metrics]
        if losses:
            total = float(np.sum([loss * examples for loss, examples in losses]))
            report.train_loss = total / sum(examples for _, examples in losses)
        if local and (found := [u.metrics["local-accuracy"] for u in uploads if "local-accuracy" in u.metrics]):
            report.metrics |= {"local_accuracy": float(np.mean(found)), **spread(found, "local_accuracy")}


class Trail:
    """How every request of one exchange ended, for live events and the audit trail.

    Parameters
    ----------
    ledger : Ledger
        Told of every request.
    place : mapping
        Where the exchange stands in the run (``round`` and ``exchange``, or ``visit``); part of every line.
    """

    def __init__(self, ledger: Ledger, place: Mapping[str, int]) -> None:
        self._ledger, self.place = ledger, dict(place)
        self._open: dict[str, Ticket] = {}
        self._lines: list[dict[str, Any]] = []

    def sent(self, message_id: str, ticket: Ticket) -> None:
        """Note that a request was sent."""
        self._open[message_id] = ticket
        self._ledger.say("request_sent", **self.place, **_whom(ticket), bytes_down=ticket.down)

    def accepted(self, message_id: str, ticket: Ticket, upload: Upload) -> None:
        """Note that `upload` has won its slot."""
        self._open.pop(message_id, None)
        times = {"seconds": _since(ticket), "bytes_up": upload.nbytes}
        self._ledger.say("reply_accepted", **self.place, **_whom(ticket), **times)

    def rejected(self, message_id: str, ticket: Ticket | None, reply: Message, error: UploadError, final: bool) -> None:
        """Note a rejected reply; without a ticket nobody knows whose it is. A `final` one ends its request."""
        if final:
            self._open.pop(message_id, None)
        whole = self._ledger.audits and reply.has_content()
        received, size = raw_digest(reply.content) if whole else (None, 0)
        line = _line(error.reason, ticket) | {
            "received": received,
            "detail": str(error).partition(": ")[2][:DETAIL],
            "seconds": None if ticket is None else _since(ticket),
            "bytes_up": size,
        }
        if ticket is None or error.reason == "wrong_node":
            line["node"] = reply.metadata.src_node_id
        self._lines.append(line)
        event = "request_lost" if error.reason == LOST else "reply_rejected"
        whom = {name: line[name] for name in ("slot", "client", "node")}
        self._ledger.say(event, **self.place, **whom, reason=error.reason, detail=line["detail"])

    def end(
        self, payloads: Mapping[int, Payload], won: Mapping[int, Upload], overruled: Mapping[int, tuple[str, str]]
    ) -> None:
        """Tell how each request of the exchange ended; `overruled` is slot -> why its upload did not count, detail."""
        found = list(self._lines)
        for slot, upload in sorted(won.items()):
            verdict, detail = overruled.get(slot, (ACCEPTED, ""))
            line = _line(verdict) | {"slot": slot, "client": upload.client, "bytes_up": upload.nbytes}
            if (trace := upload.trace) is not None:
                line |= {"node": trace.node, "sent": trace.sent or None, "received": trace.received or None}
                line |= {"seconds": trace.seconds, "bytes_down": trace.down}
            found.append(line | ({"detail": detail[:DETAIL]} if detail else {}))
        for ticket in self._open.values():
            line = _line(NOT_NEEDED if ticket.expected.slot in won else LOST, ticket)
            silent = {"detail": f"no reply in {_since(ticket):.0f} s, when the exchange ended"}
            found.append(line | silent if line["verdict"] == LOST else line)
        named = {line["slot"] for line in found}
        found += [never_asked(slot, one.task.client) for slot, one in payloads.items() if slot not in named]
        reasons = {line["slot"]: line["verdict"] for line in found}
        for slot, payload in payloads.items():
            if slot not in won or slot in overruled:
                reason = overruled[slot][0] if slot in overruled else reasons[slot]
                self._ledger.say("slot_lost", **self.place, slot=slot, client=payload.task.client, reason=reason)
        for line in found if self._ledger.audits else ():
            self._ledger.say("request_ended", **self.place, **line)


def never_asked(slot: int, client: int) -> dict[str, Any]:
    """Return the line of a slot whose client this process did not ask: not connected, or too slow for the deadline."""
    return _line(LOST) | {"slot": slot, "client": client, "detail": NOT_ASKED}


def _whom(ticket: Ticket) -> dict[str, Any]:
    return {"slot": ticket.expected.slot, "client": ticket.expected.client, "node": ticket.node}


def _since(ticket: Ticket) -> float:
    return round(time.monotonic() - ticket.made, 4)


def _line(verdict: str, ticket: Ticket | None = None) -> dict[str, Any]:
    """Return the line of a request to which nothing came."""
    costs = {"seconds": None, "bytes_down": 0, "bytes_up": 0}
    line = {**dict.fromkeys(("slot", "client", "node", "sent", "received")), "verdict": verdict, **costs}
    return line if ticket is None else line | _whom(ticket) | {"sent": ticket.sent or None, "bytes_down": ticket.down}
