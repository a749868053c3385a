"""The SuperNode's pauses: short while a run is on, Flower's own when nothing happens; the loop has no others."""

from __future__ import annotations

import ast
import inspect
import sys
import time

import pytest
from flwr.supernode import cli, start_client_internal

from fedcross.engines.executor import node, supervisor
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


def test_it_becomes_flowers_program(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(cli, "flower_supernode", lambda: said.append((list(sys.argv), start_client_internal.time)))
    assert node.main(["--superlink", "h:1"]) == 0
    [(words, used)] = said
    assert words == ["flower-supernode", "--superlink", "h:1"]
    assert isinstance(used, Pauses)


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
