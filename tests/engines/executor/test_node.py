"""The SuperNode's pauses: short while a run is on, Flower's own when nothing happens; the loop has no others."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flwr.supernode import cli, start_client_internal

from fedcross.engines.executor import link, node, supervisor
from fedcross.engines.executor.node import LEAST_S, LOOK_S, Pauses
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Pauses:
    return Pauses(clock.monotonic, clock.sleep)


def took(clock: Clock, pauses: Pauses, seconds: float) -> float:
    before = clock.now
    pauses.sleep(seconds)
    return clock.now - before


def test_an_idle_device_asks_as_seldom_as_flowers(clock: Clock, pauses: Pauses) -> None:
    assert took(clock, pauses, 3) == 3


def test_a_device_that_has_just_answered_asks_again_soon(clock: Clock, pauses: Pauses) -> None:
    clock.now = 100.0
    assert took(clock, pauses, 0.5) == pytest.approx(LOOK_S)
    waited = [took(clock, pauses, 3) for _ in range(60)]
    assert waited[0] == pytest.approx(LEAST_S)
    assert waited == sorted(waited)
    assert waited[-1] == 3
    elapsed = LOOK_S
    for pause in waited:
        assert pause <= max(LEAST_S, 0.1 * elapsed) + 1e-9
        elapsed += pause


def test_a_shorter_pause_of_flowers_stays_short(clock: Clock, pauses: Pauses) -> None:
    assert took(clock, pauses, 0.01) == pytest.approx(0.01)


def test_the_rest_of_the_module_is_there(pauses: Pauses) -> None:
    assert pauses.monotonic is time.monotonic


def test_the_loop_has_the_pauses_that_are_expected() -> None:
    """Read in Flower's source: 3 s where no message was found, .5 s where a reply is awaited."""
    calls = [found for found in ast.walk(ast.parse(inspect.getsource(start_client_internal)))
             if isinstance(found, ast.Call) and ast.unparse(found.func) == "time.sleep"]  # fmt: skip
    assert sorted(ast.literal_eval(found.args[0]) for found in calls) == [0.5, 0.5, 3]


def test_it_becomes_flowers_program_and_ends_with_its_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said, notes = [], []
    monkeypatch.setenv(link.FOLDER, str(tmp_path))
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(node.leftovers, "attach", lambda: said.append("leftovers"))
    monkeypatch.setattr(node, "endure", notes.append)
    monkeypatch.setattr(node.os, "_exit", sys.exit)
    monkeypatch.setattr(cli, "flower_supernode", lambda: said.append((list(sys.argv), start_client_internal.time)))
    with pytest.raises(SystemExit) as ended:
        node.main(["--superlink", "h:1", "--port", "77"])
    assert ended.value.code == node.ENDED
    assert "the SuperNode's loop has ended" in capsys.readouterr().err
    [first, (words, used)] = said
    assert first == "leftovers"
    assert words == ["flower-supernode", "--superlink", "h:1", "--port", "77"]
    assert isinstance(used, Pauses)
    [note] = notes
    note()
    assert link.last(tmp_path / "fedcross-link-77") is not None


ENDS = {
    "returned": ("lambda: None", "loop has ended;"),
    "raised": ("lambda: {}['x']", "loop has ended (KeyError);"),
    "a thread of its own failed": ("lambda: (threading.Thread(target=lambda: 1 / 0).start(), time.sleep(60))",
                                   "of the SuperNode has failed (ZeroDivisionError);"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_however_its_loop_ended_and_whatever_threads_are_left(how: str) -> None:
    """A real process: Flower's own stays, for its interface has a thread that goes on."""
    start, says = ENDS[how]
    code = (
        "import threading, time\n"
        "from fedcross.engines.executor import node\n"
        "node.GRACE_S = 0.05\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"node.run({start})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == node.ENDED
    assert says in ended.stderr


def test_a_request_to_end_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with pytest.raises(SystemExit) as ended:
        node.run(lambda: sys.exit(0))
    assert ended.value.code == 0


def test_a_refused_key_is_no_request_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower ends with exit code 0 then."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(node, "SHUT_OUT", threading.Event())
    monkeypatch.setattr(node.os, "_exit", sys.exit)
    node.SHUT_OUT.set()
    with pytest.raises(SystemExit) as ended:
        node.run(lambda: sys.exit(0))
    assert ended.value.code == node.ENDED
    assert "the SuperLink refuses this device's key" in capsys.readouterr().err


def test_a_loop_without_these_pauses_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(start_client_internal, "time")
    node.shorten()
    assert not hasattr(start_client_internal, "time")
    assert "no pauses that are known" in caplog.text


def test_the_supervisor_starts_it_where_the_version_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["/opt/bin/flower-supernode", "--insecure"]
    command = supervisor.node_command(asked)
    assert command[-3:] == [command[-3], "node", "--insecure"]
    assert command[-3].endswith("program.py")
    assert supervisor.node_command(["python", "-V"])[0].endswith("python")
    monkeypatch.setattr(supervisor.runtime, "known", lambda: False)
    assert supervisor.node_command(["flower-supernode", "--insecure"])[0].endswith("flower-supernode")
