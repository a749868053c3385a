"""What a run is doing now, for the live page and ``/metrics``: fed with the run's events, read by other threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: Most points of the curve and most devices that a snapshot holds.
POINTS, DEVICES = 400, 100
#: Fields of a round that are added up.
PHASES = ("seconds_training", "seconds_aggregation")
SUMS = ("clients", "dropped", "clipped", "spares", "bytes_down", "bytes_up", "seconds", *PHASES)
#: Events that end a run, and its state then.
ENDS = {"run_finished": "finished", "run_stopped": "stopped", "run_failed": "ended"}


class Board:
    """The state of one run; `online` is the number of connected clients, None until somebody has looked."""

    def __init__(self) -> None:
        self.online: int | None = None
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._slots: dict[int, dict[str, Any]] = {}
        self._devices: dict[int, dict[str, Any]] = {}
        self._curve: list[dict[str, Any]] = []
        self._began, self._first = time.time(), 0
        self._now: dict[str, Any] = {"run": {}, "state": "starting", "round": 0, "waiting": None, "checkpoint": None}
        self._last: dict[str, Any] = {}

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in an event of the run (:data:`core.events.EVENTS`)."""
        with self._lock:
            match event:
                case "run_started":
                    self._now |= {"run": dict(fields), "state": "running", "round": int(fields["after_round"])}
                    self._began, self._first = time.time(), int(fields["after_round"])
                case "waiting_for_clients":
                    self.online = int(fields["connected"])
                    self._now["waiting"] = f"{fields['needed']} clients, {self.online} are connected"
                case "round_started":
                    self._now |= {"round": int(fields["round"]), "waiting": None}
                    self._slots = {}
                case "request_sent":
                    slot, client = int(fields["slot"]), self._device(fields)["client"]
                    self._slots[slot] = {"slot": slot, "client": client, "since": time.time(), "state": "out"}
                    self._totals["requests"] += 1
                case "reply_accepted" | "reply_rejected" | "request_lost" | "slot_lost":
                    self._ended(event, fields)
                case "round_finished":
                    self._last = dict(fields)
                    self._now |= {"round": int(fields["round"]), "waiting": None}
                    self._totals.update({name: fields.get(name) or 0 for name in SUMS})
                    self._curve += _points(fields)
                case "checkpoint_written":
                    self._now["checkpoint"] = time.time()
                case "run_finished" | "run_stopped" | "run_failed":
                    state = f"{ENDS[event]} {fields.get('text', '')}".strip()
                    self._now |= {"state": state[:300], "waiting": None}

    def recall(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Take the curve of rounds that were run before this process."""
        with self._lock:
            self._curve = [point for entry in entries for point in _points(entry)]

    def snapshot(self) -> dict[str, Any]:
        """Return everything as JSON values; times are in seconds since 1970."""
        with self._lock:
            latest = sorted(self._devices.values(), key=lambda one: -(one["seen"] or 0))[:DEVICES]
            step = -(-len(self._curve) // POINTS) or 1
            out = sum(slot["state"] == "out" for slot in self._slots.values())
            done = int(self._last.get("round", self._first)) - self._first
            left = None
            if done and self._now["state"] == "running":
                pace = (time.time() - self._began) / done
                left = pace * (int(self._now["run"]["rounds"]) - int(self._last["round"]))
            return {
                **self._now,
                "now": time.time(),
                "waiting": self._now["waiting"] or (f"{out} replies" if out else None),
                "rounds_done": done,
                "left_s": left,
                "online": self.online,
                "curve": self._curve[::-1][::step][::-1],
                "slots": [dict(slot) for _, slot in sorted(self._slots.items())],
                "devices": [dict(one) for one in sorted(latest, key=lambda one: int(one["client"]))],
                "totals": dict(self._totals),
                "rejected": dict(self._rejected),
                "last": dict(self._last),
            }

    def _device(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        zero = {"node": "", "seen": None, "visits": 0, "seconds": 0.0, "bytes_up": 0, "rejected": 0}
        device = self._devices.setdefault(int(fields["client"]), {"client": int(fields["client"]), **zero})
        device["node"] = str(fields.get("node", device["node"]))
        return device

    def _ended(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in how a request ended; a slot keeps its first accepted reply."""
        reason = "accepted" if event == "reply_accepted" else str(fields["reason"])
        self._rejected.update([reason] if event == "reply_rejected" else [])
        slot = self._slots.get(-1 if fields.get("slot") is None else int(fields["slot"]))
        if slot is not None and slot["state"] != "accepted":
            slot["state"] = reason
        if event.startswith("reply") and fields.get("client") is not None:
            device = self._device(fields)
            device["seen"] = time.time()
            device["rejected"] += event == "reply_rejected"
            if event == "reply_accepted":
                device["visits"] += 1
                device["seconds"] += float(fields["seconds"])
                device["bytes_up"] += int(fields["bytes_up"])


def _points(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the curve's point of a round that was evaluated, in a list."""
    accuracy, similarity = entry.get("test_accuracy"), entry.get("pool_similarity_mean")
    point = {"round": entry["round"], "accuracy": accuracy, "similarity": similarity}
    return [] if accuracy is None else [point]
