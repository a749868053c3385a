"""What a run is doing now, for the live page and ``/metrics``: fed with the run's events, read by another thread.

The run's thread only puts numbers into small dictionaries. Whoever reads gets a copy.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Most points of the curve and most devices that a snapshot holds; the curve is thinned, devices are the latest seen.
POINTS, DEVICES = 400, 100
#: Fields of a round that are added up.
SUMS = ("clients", "dropped", "clipped", "spares", "bytes_down", "bytes_up", "seconds")
PHASES = ("training", "aggregation")


@dataclass
class Device:
    """One client: when it was last heard, what it did."""

    client: int
    node: str = ""
    key: str = ""
    seen: float | None = None
    visits: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    rejected: int = 0


@dataclass
class Slot:
    """One model that was sent out: to whom, since when, and what became of it."""

    slot: int
    client: int
    node: str
    since: float
    state: str = "out"


@dataclass
class Point:
    """One evaluated round."""

    round: int
    accuracy: float
    similarity: float | None = None


@dataclass
class _Facts:
    run: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"
    round: int = 0
    round_since: float = 0.0
    waiting: dict[str, Any] | None = None
    checkpoint: float | None = None
    entry: dict[str, Any] = field(default_factory=dict)


class Board:
    """The state of one run.

    Parameters
    ----------
    deadline_s : float
        How long the server waits for the replies of a round.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        #: Grows with every change, so that readers see whether there is anything new.
        self.version = 0
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.rejected: Counter[str] = Counter()
        self.phases: defaultdict[str, float] = defaultdict(float)
        #: Clients that are connected; None until somebody has looked.
        self.online: int | None = None
        self._lock = threading.Lock()
        self._facts = _Facts()
        self._points: list[Point] = []
        self._slots: dict[int, Slot] = {}
        self._out = 0  # slots whose state is "out"
        self._devices: dict[int, Device] = {}
        self._asked: Counter[tuple[Any, ...]] = Counter()
        self._began, self._done_before = time.time(), 0

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in an event of the run (:data:`core.events.EVENTS`)."""
        handler = getattr(self, f"_on_{event}", None)
        with self._lock:
            if handler is not None:
                handler(fields)
            self.version += 1

    def recall(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Take the curve of rounds that were run before this process; of many, :data:`POINTS` at most."""
        scored = [entry for entry in entries if entry.get("test_accuracy") is not None]
        step = -(-len(scored) // POINTS) or 1
        with self._lock:
            self._points = [_point(entry) for entry in scored[::-1][::step][::-1]]
            self.version += 1

    def snapshot(self) -> dict[str, Any]:
        """Return everything as JSON values; times are in seconds since 1970."""
        with self._lock:
            facts, now = self._facts, time.time()
            heard = sorted(self._devices.values(), key=lambda one: -(one.seen or 0))[:DEVICES]
            step = -(-len(self._points) // POINTS) or 1
            kept = self._points[::-1][::step][::-1]
            return {
                "now": now,
                "run": facts.run,
                "state": facts.state,
                "round": facts.round,
                "round_since": facts.round_since,
                "left_s": self._left(),
                "waiting": {"what": f"{self._out} replies"} | facts.waiting if facts.waiting else None,
                "checkpoint": facts.checkpoint,
                "online": self.online,
                "devices_known": len(self._devices),
                "curve": [dict(vars(point)) for point in kept],
                "slots": [dict(vars(slot)) for _, slot in sorted(self._slots.items())],
                "devices": [dict(vars(one)) for one in sorted(heard, key=lambda one: one.client)],
                "totals": dict(self.totals),
                "rejected": dict(self.rejected),
                "last": facts.entry,
            }

    def _left(self) -> float | None:
        """Return the seconds until the last round at the pace so far; None before the first round."""
        facts = self._facts
        done = int(facts.entry.get("round", 0)) - self._done_before
        if done < 1 or facts.state != "running":
            return None
        each = (float(facts.entry["at"]) - self._began) / done
        return max(each * (int(facts.run["rounds"]) - int(facts.entry["round"])), 0.0)

    # ---- events -------------------------------------------------------------------------------------------------

    def _on_run_started(self, fields: Mapping[str, Any]) -> None:
        self._facts.run, self._facts.state = dict(fields), "running"
        self._began, self._done_before = time.time(), int(fields["after_round"])
        self._facts.round = self._done_before

    def _on_waiting_for_clients(self, fields: Mapping[str, Any]) -> None:
        what = f"{fields['needed']} clients, {fields['connected']} are connected"
        self._facts.waiting = {"what": what, "until": time.time() + fields["seconds"]}
        self.online = int(fields["connected"])

    def _on_round_started(self, fields: Mapping[str, Any]) -> None:
        self._facts.round, self._facts.round_since = int(fields["round"]), time.time()
        self._slots, self._out = {}, 0
        self._asked.clear()

    def _on_request_sent(self, fields: Mapping[str, Any]) -> None:
        client, node, now = int(fields["client"]), str(fields["node"]), time.time()
        device = self._devices.setdefault(client, Device(client))
        device.node, device.key = node, fields.get("key") or ""
        slot = int(fields["slot"])
        before = self._slots.get(slot)
        self._out += before is None or before.state != "out"
        self._slots[slot] = Slot(slot, client, node, now)
        self.totals["requests"] += 1
        again = (fields.get("exchange"), fields.get("visit"), fields["slot"], client)
        self._asked[again] += 1
        self.totals["resends"] += self._asked[again] > 1
        self._wait_for_replies(now)

    def _wait_for_replies(self, now: float) -> None:
        if not self._out:
            self._facts.waiting = None
        elif not (self._facts.waiting and self._facts.waiting.get("replies")):
            self._facts.waiting = {"until": now + self.deadline_s, "replies": True}

    def _on_reply_accepted(self, fields: Mapping[str, Any]) -> None:
        device = self._heard(fields)
        device.visits += 1
        device.seconds += float(fields["seconds"])
        device.bytes_up += int(fields["bytes_up"])
        self._ended(fields, "accepted")

    def _on_reply_rejected(self, fields: Mapping[str, Any]) -> None:
        self.rejected[str(fields["reason"])] += 1
        if fields.get("client") is not None:
            self._heard(fields).rejected += 1
            self._ended(fields, str(fields["reason"]))

    def _on_request_lost(self, fields: Mapping[str, Any]) -> None:
        self._ended(fields, str(fields["reason"]))  # the SuperLink says so: no sign of the device's life

    def _on_slot_lost(self, fields: Mapping[str, Any]) -> None:
        self._ended(fields, str(fields["reason"]))

    def _heard(self, fields: Mapping[str, Any]) -> Device:
        client = int(fields["client"])
        device = self._devices.setdefault(client, Device(client, str(fields.get("node", ""))))
        device.seen = time.time()
        return device

    def _ended(self, fields: Mapping[str, Any], state: str) -> None:
        slot = self._slots.get(int(fields["slot"])) if fields.get("slot") is not None else None
        if slot is not None and slot.state != "accepted":
            self._out -= slot.state == "out"
            slot.state = state
        self._wait_for_replies(time.time())

    def _on_round_finished(self, entry: Mapping[str, Any]) -> None:
        now = time.time()
        self._facts.entry = {**entry, "at": now}
        self._asked.clear()
        self._facts.round, self._facts.waiting = int(entry["round"]), None
        for name in SUMS:
            self.totals[name] += float(entry.get(name) or 0)
        for name in PHASES:
            self.phases[name] += entry.get(f"seconds_{name}") or 0
        if entry.get("test_accuracy") is not None:
            self._points.append(_point(entry))

    def _on_checkpoint_written(self, fields: Mapping[str, Any]) -> None:
        self._facts.checkpoint = time.time()
        self.phases["checkpoint"] += float(fields["seconds"])

    def _on_run_finished(self, _: Mapping[str, Any]) -> None:
        self._facts.state, self._facts.waiting = "finished", None

    def _on_run_stopped(self, _: Mapping[str, Any]) -> None:
        self._facts.state, self._facts.waiting = "stopped at stop_at", None

    def _on_run_failed(self, fields: Mapping[str, Any]) -> None:
        self._facts.state, self._facts.waiting = f"ended: {fields['text']}"[:300], None


def _point(entry: Mapping[str, Any]) -> Point:
    return Point(int(entry["round"]), float(entry["test_accuracy"]), entry.get("pool_similarity_mean"))
