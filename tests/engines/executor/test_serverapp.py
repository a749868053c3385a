from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fedcross.engines.executor import program, serverapp

RUN = {"token": "secret", "arguments": ["--insecure"], "silent": False}


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its


def say(end: socket.socket, said: Any) -> None:
    end.sendall(f"{json.dumps(said)}\n".encode())


def test_it_begins_only_when_it_is_told_to_after_its_answer(line: tuple[socket.socket, socket.socket]) -> None:
    ours, its = line
    heard = ours.makefile("r")
    given: list[Any] = []
    waits = threading.Thread(target=lambda: given.append(serverapp.await_run(its)))
    waits.start()
    assert json.loads(heard.readline()) == {"ready": True}
    say(ours, RUN)
    assert json.loads(heard.readline()) == {"taken": True}
    assert waits.is_alive()
    say(ours, {"go": True})
    waits.join()
    assert given == [RUN]


@pytest.mark.parametrize("told", [[], [RUN], [RUN, {"stop": True}]])
def test_without_the_word_to_begin_there_is_no_run(line: tuple[socket.socket, socket.socket], told: list[Any]) -> None:
    ours, its = line
    for said in told:
        say(ours, said)
    ours.shutdown(socket.SHUT_WR)
    assert serverapp.await_run(its) is None


def test_it_imports_until_there_is_a_run(
    line: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = line
    imported: list[str] = []

    def load(name: str) -> Any:
        imported.append(name)
        if name == "missing":
            raise ImportError(name)
        if name == "b":
            say(ours, RUN)
        return type("Module", (), {serverapp.FUNCTION: "Flower's"})

    monkeypatch.setattr(serverapp, "import_module", load)
    monkeypatch.setattr(serverapp, "IMPORTS", ("missing", "a"))
    assert serverapp.prepare(its) == "Flower's"  # type: ignore[comparison-overlap]
    assert imported == [serverapp.MODULE, "missing", "a"]
    monkeypatch.setattr(serverapp, "IMPORTS", ("a", "b", "c"))
    imported.clear()
    serverapp.prepare(its)
    assert imported == [serverapp.MODULE, "a", "b"]


def test_it_becomes_flowers_command_with_the_runs_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(serverapp, "call_itself", names.append)
    monkeypatch.setattr(sys, "argv", ["before"])
    seen: list[list[str]] = []
    serverapp.become(lambda: seen.append(sys.argv), RUN)
    [[command, *arguments]] = seen
    assert command.endswith("/flwr-serverapp")
    assert arguments == ["--insecure", "--token", "secret"]
    assert names == ["flwr-serverapp"]


def test_a_waiting_process_holds_nothing_of_fedcross_and_ends_with_its_line() -> None:
    """What is imported must not be what a run's bundle brings."""
    code = (
        "import socket, sys; sys.path[:] = [p for p in sys.path if p]; from runpy import run_path;"
        f"load = run_path({program.__file__!r})['load']; part = load('serverapp');"
        "part.MODULE, part.FUNCTION, part.IMPORTS = 'json', 'loads', ();"
        "ours, its = socket.socketpair(); part.prepare(its); ours.close(); assert part.await_run(its) is None;"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('fedcross', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
