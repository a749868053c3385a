"""Whether a device has its link: what is written after an answer, and what the health check makes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fedcross.engines.executor import link
from fedcross.engines.executor.link import CUT_OFF_S, Answers, fault
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(link.FOLDER, str(tmp_path))
    return tmp_path


def test_a_device_has_its_link_while_the_last_answer_is_not_too_old() -> None:
    assert fault(100.0, 100.0) is None
    assert fault(100.0, 100.0 + CUT_OFF_S) is None
    assert fault(100.0, 101.0 + CUT_OFF_S) == f"the SuperLink has not answered for {CUT_OFF_S + 1:.0f} s"
    assert fault(None, 5.0) == "the SuperLink has not answered yet"
    assert fault(9000.0, 5.0) is not None  # from before a restart of the machine


def test_answers_are_written_once_a_second_and_begin_anew(clock: Clock, folder: Path) -> None:
    path = link.place(9094)
    assert path is not None
    path.write_text("7")
    answers = Answers(path)
    assert link.last(path) is None
    clock.now = 100.0
    answers.note()
    assert link.last(path) == 100
    clock.now = 100.5
    answers.note()
    assert link.last(path) == 100
    clock.now = 102.0
    answers.note()
    assert link.last(path) == 102
    assert [one.name for one in folder.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_place_nothing_is_written_and_a_place_that_is_gone_ends_nothing(
    clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Answers(None).note()
    Answers(folder / "gone" / "file").note()
    (folder / "odd").write_text("soon")
    assert link.last(folder / "odd") is None
    assert list(folder.iterdir()) == [folder / "odd"]
    monkeypatch.setenv(link.FOLDER, str(folder / "gone"))
    assert link.place(1) is None


@pytest.fixture
def health() -> Iterator[int]:
    """Yield the port of a SuperNode's interface, whose loop may be at an end."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_the_health_check_asks_the_device_and_looks_at_its_link(
    health: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert link.main([str(health)]) == 1
    assert "has not answered yet" in capsys.readouterr().err
    Answers(link.place(health)).note()
    assert link.main([str(health)]) == 0
    assert capsys.readouterr().err == ""


def test_the_health_check_says_that_the_device_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert link.main(["9"]) == 1
    assert "does not answer on port 9" in capsys.readouterr().err
