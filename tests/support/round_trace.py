"""Which project files one round enters, and how often control moves from one of them into another.

``python -m tests.support.round_trace`` prints the files of one warm local round with two clients, and every move.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The folders whose files count.
SOURCES = ("analysis", "client", "conf", "core", "deploy", "engines", "server", "strategies", "tasks")
#: The round that is traced: one worker, so that everything happens in this process.
#: Each step of training moves between files, so the data is fixed too: 1,000 digits, one epoch, 21 steps in all.
SETTINGS = (
    *("method=fedcross", "task=digits", "partition.clients=2", "clients_per_round=2", "engine.workers=1"),
    *("task.limit=1000", "train.epochs=1", "logger=none"),
)


@dataclass
class Trace:
    """What was seen.

    Attributes
    ----------
    files : Counter
        Project file -> calls of its functions.
    moves : Counter
        ``(from file, to file, function)`` -> calls that a function of one project file made of a function in another.
        A call through Flower or torch enters a file but is no move; a return is none either.
    """

    files: Counter[str] = field(default_factory=Counter)
    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _known: dict[str, str | None] = field(default_factory=dict)

    def __enter__(self) -> Trace:
        sys.setprofile(self._event)
        threading.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        here = self._place(frame)
        if here is None:
            return
        self.files[here] += 1
        there = self._place(frame.f_back) if frame.f_back is not None else None
        if there is not None and there != here:
            self.moves[there, here, frame.f_code.co_qualname] += 1

    def _place(self, frame: FrameType) -> str | None:
        """Return the frame's file relative to the project, None if it is not one of its sources."""
        name = frame.f_code.co_filename
        if name not in self._known:
            path = Path(name)
            inside = path.is_absolute() and path.is_relative_to(ROOT)
            relative = path.relative_to(ROOT) if inside else None
            self._known[name] = str(relative) if relative is not None and relative.parts[0] in SOURCES else None
        return self._known[name]


def trace_round(folder: Path, number: int = 2) -> Trace:
    """Run two rounds in `folder` and return what round `number`, with everything warm, did."""
    from fedcross.server.launch import launch
    from fedcross.server.session import Session

    whole = Session._round
    trace = Trace()

    def traced(session: Session, current: int) -> dict[str, Any]:
        if current != number:
            return whole(session, current)
        with trace:
            return whole(session, current)

    Session._round = traced  # type: ignore[method-assign]
    try:
        launch([*SETTINGS, f"rounds={number}"], folder)
    finally:
        Session._round = whole  # type: ignore[method-assign]
    return trace


def main() -> None:
    """Print the trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_round(Path(folder))
    for name, calls in sorted(trace.files.items()):
        print(f"{calls:6d} calls  {name}")
    for (caller, name, function), times in sorted(trace.moves.items()):
        print(f"{times:6d} moves  {caller} -> {name} {function}")
    print(f"{len(trace.files)} files, {sum(trace.moves.values())} moves")


if __name__ == "__main__":
    main()
