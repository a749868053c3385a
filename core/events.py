"""Structured log: one JSON object per line on stderr, for programs that read what a run says (``log.format=json``).

Every object has ``time`` (UTC, ISO 8601) and ``event``, a name of :data:`EVENTS`. With ``log.format=text``, the
default, people read plain sentences instead, and :func:`emit` does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from fedcross.core.files import dumps

_REQUEST = "round exchange visit slot client node"
#: Event -> the fields that it has besides ``time`` and ``event``; requests have one of round, exchange and visit.
EVENTS = {
    "run_started": "run folder method task engine seed rounds after_round clients_per_round",
    "waiting_for_clients": "round connected needed seconds",
    "round_started": "round clients connected",
    "request_sent": f"{_REQUEST} bytes_down",
    "reply_accepted": f"{_REQUEST} seconds bytes_up",
    "reply_rejected": f"{_REQUEST} reason detail",
    "request_lost": f"{_REQUEST} reason detail",  # the SuperLink has no reply: the device is gone, say
    "slot_lost": f"{_REQUEST} reason",  # an exchange ends without an upload that counts
    "round_finished": "",  # those of a line of metrics.jsonl
    "checkpoint_written": "round seconds",
    "run_finished": "run rounds final_accuracy best_accuracy audit_sha256",
    "run_stopped": "run rounds",  # the round of stop_at is done
    "run_interrupted": "folder text",
    "run_failed": "error text exit_code",  # with engine=superlink or remote, the ServerApp's comes first
    "message": "level text",  # fedcross says something that has no event of its own
    "flower": "level text",  # a line of Flower, Ray or another library
}
_PREFIX = "fedcross: "
_state = {"json": False}
_lock = threading.Lock()


def structured() -> bool:
    """Return whether this process writes JSON."""
    return _state["json"]


@contextlib.contextmanager
def log_format(name: str) -> Iterator[None]:
    """Write the log in the format `name`, ``json`` or ``text``, inside the block; JSON stays JSON in a block within.

    No handler writes a line a second time, whoever sets one and when: Flower's logger adds its own when it is
    imported, which is often inside the block. So a filter of the logger, which comes before all handlers, takes them.
    """
    before = _state["json"]
    if name == "json":
        become_json()
    try:
        yield
    finally:
        if _state["json"] and not before:
            _state["json"] = False
            logging.getLogger("flwr").removeFilter(_taken)


def become_json() -> None:
    """Write JSON until the outermost block of :func:`log_format` ends: settings that are read in it say so."""
    _state["json"] = True
    logging.getLogger("flwr").addFilter(_taken)  # a second time it does nothing


def emit(event: str, **fields: Any) -> None:
    """Write an event, if the log is JSON."""
    if _state["json"]:
        _write({"event": event, **fields})


def say(text: str, level: str = "INFO") -> None:
    """Print `text` for people at once, also where the output is a pipe; as an event if the log is JSON."""
    if _state["json"]:
        _write({"event": "message", "level": level, "text": text})
    else:
        print(text, file=sys.stderr if level != "INFO" else sys.stdout, flush=True)


def failed(error: BaseException) -> None:
    """Write that `error` ends the run."""
    facts = {"error": type(error).__name__, "text": str(error), "exit_code": getattr(error, "exit_code", 1)}
    emit("run_failed", **facts)


def relay(line: str) -> None:
    """Pass on a line that another process of the run has logged: its events as they are, other lines wrapped."""
    if not _state["json"]:
        print(line, flush=True)  # a pipe or a file shows it at once too
    elif line.strip():
        event = _event(line)
        if event is None:
            _write({"event": "flower", "level": "INFO", "text": line})
        else:
            _write(event)


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("event") in EVENTS else None


def _write(fields: dict[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = dumps({"time": now, **fields}, default=str, separators=(",", ":"))
    with _lock:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class _Taken(logging.Filter):
    """Writes what is logged through Flower's logger; fedcross's own lines begin with its name."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Write `record`; return False, so that no handler gets it."""
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
            own = text.startswith(_PREFIX)
            name, text = ("message", text.removeprefix(_PREFIX)) if own else ("flower", text)
            _write({"event": name, "level": record.levelname, "text": text})
        return False


_taken = _Taken()
