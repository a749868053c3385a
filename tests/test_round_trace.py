"""One local round stays easy to follow: few files, few calls between them."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from fedcross.server.launch import launch
from fedcross.server.session import Session

ROOT = Path(__file__).resolve().parents[1]
#: The folders whose files count.
SOURCES = ("analysis", "client", "conf", "core", "deploy", "engines", "server", "strategies", "tasks")
#: One worker, so that the round stays in this process; 1,000 digits and one epoch, which are 21 steps.
SETTINGS = (
    *("method=fedcross", "task=digits", "partition.clients=2", "clients_per_round=2", "engine.workers=1"),
    *("task.limit=1000", "train.epochs=1", "logger=none", "rounds=2"),
)
#: The most that one round may take: lower them when the round gets simpler, never raise them.
FILES, CALLS = 15, 56


def place(frame):
    """Return the frame's file relative to the project, None if it is not one of its sources."""
    path = Path(frame.f_code.co_filename) if frame is not None else ROOT
    relative = path.relative_to(ROOT) if path.is_absolute() and path.is_relative_to(ROOT) else Path()
    return str(relative) if relative.parts and relative.parts[0] in SOURCES else None


@pytest.mark.slow
def test_a_round_enters_few_files_and_calls_little_between_them(tmp_path, monkeypatch):
    files, calls, whole = Counter(), Counter(), Session._round

    def event(frame, kind, _):
        if kind == "call" and (here := place(frame)) is not None:
            files[here] += 1
            caller = place(frame.f_back)
            if caller not in (None, here):
                calls[caller, here, frame.f_code.co_qualname] += 1

    def traced(session, number):
        if number == 1:
            return whole(session, number)
        sys.setprofile(event)
        try:
            return whole(session, number)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Session, "_round", traced)
    launch(list(SETTINGS), tmp_path)
    assert len(files) <= FILES, sorted(files)
    assert calls.total() <= CALLS, calls.most_common()
    assert {"client/trainer.py", "strategies/fedcross.py", "server/session.py"} <= set(files)
