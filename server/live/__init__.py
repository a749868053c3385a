"""The live page of a run, and ``/metrics`` for Prometheus: the run's state, fed by its events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from http.server import ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedcross.server.live.http import ADDRESS, serve
from fedcross.server.observers import Observer

#: Most points of the curve and most devices that a snapshot holds.
POINTS, DEVICES = 400, 100
#: Fields of a round that are added up.
PHASES = ("seconds", "seconds_training", "seconds_aggregation")
SUMS = ("clients", "dropped", "clipped", "spares", "bytes_down", "bytes_up", *PHASES)


class LivePage(Observer):
    """Serves the page of the run at host and port `address` until the run ends; without it if the port is taken."""

    watches = frozenset({"events"})

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self._folder, self._address = folder, address
        self._server: ThreadingHTTPServer | None = None
        self._lock = threading.Lock()
        self._totals, self._rejected = Counter[str](), Counter[str]()
        self._slots: dict[int, dict[str, Any]] = {}
        self._devices: dict[int, dict[str, Any]] = {}
        self._curve: list[dict[str, Any]] = []
        self._began, self._first = time.time(), 0
        self._last: dict[str, Any] = {}
        self._now: dict[str, Any] = {"run": {}, "state": "starting", "round": 0}
        self._now |= {"waiting": None, "checkpoint": None, "online": None}

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            self._began, self._first = time.time(), int(run["after_round"])
            self._now |= {"run": dict(run), "state": "running", "round": self._first}
            self._curve = [point for entry in lines for point in _points(entry)]
        try:
            self._server = serve(self.snapshot, self._folder, *self._address)
        except (OSError, ValueError) as error:
            log(WARNING, "fedcross: no live page at %s:%s (%s); the run goes on without.", *self._address, error)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            self._now["online"] = fields.get("connected", self._now["online"])
            match event:
                case "waiting_for_clients":
                    self._now["waiting"] = f"{fields['needed']} clients, {fields['connected']} are connected"
                case "round_started":
                    self._now |= {"round": int(fields["round"]), "waiting": None}
                    self._slots = {}
                case "request_sent":
                    slot, client = int(fields["slot"]), self._device(fields)["client"]
                    self._slots[slot] = {"slot": slot, "client": client, "since": time.time(), "state": "out"}
                    self._totals["requests"] += 1
                case "reply_accepted" | "reply_rejected" | "request_lost" | "slot_lost":
                    self._ended(event, fields)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        with self._lock:
            self._last = dict(entry)
            self._now |= {"round": int(entry["round"]), "waiting": None}
            self._totals.update({name: entry.get(name) or 0 for name in SUMS})
            self._curve += _points(entry)

    def checkpoint_written(self, number: int, seconds: float) -> None:
        with self._lock:
            self._now["checkpoint"] = time.time()

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        said = f"ended {str(error) or type(error).__name__}"[:300]
        state = "finished" if result is not None else "stopped" if error is None else said
        with self._lock:
            self._now |= {"state": state, "waiting": None}
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            (self._folder / ADDRESS).unlink(missing_ok=True)

    def snapshot(self) -> dict[str, Any]:
        """Return everything as JSON values; times are in seconds since 1970. Other threads call it."""
        with self._lock:
            latest = sorted(self._devices.values(), key=lambda one: -(one["seen"] or 0))[:DEVICES]
            step = -(-len(self._curve) // POINTS) or 1
            out = sum(slot["state"] == "out" for slot in self._slots.values())
            done = int(self._last.get("round", self._first)) - self._first
            left = None
            if done and self._now["state"] == "running":
                left = (time.time() - self._began) / done * (int(self._now["run"]["rounds"]) - int(self._last["round"]))
            return {
                **self._now,
                "now": time.time(),
                "waiting": self._now["waiting"] or (f"{out} replies" if out else None),
                "rounds_done": done,
                "left_s": left,
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
