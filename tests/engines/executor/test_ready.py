"""When a process is ready for a run, and when Flower starts one; tests/e2e/test_ready.py does it with real ones."""

from __future__ import annotations

from typing import Any

import pytest

from fedcross.engines.executor.ready import ANSWER_S, MOST_DEATHS, PATIENCE_S, SETTLE_S, Ready, switch

RUN = {"token": "t", "arguments": ["--insecure"], "silent": True}


class Process:
    """A process that says what a test wants; "end" stands for its end."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)
        self.heard: list[Any] = []
        self.waited: list[float] = []

    def tell(self, said: dict[str, Any]) -> None:
        self.heard.append(said)

    def hear(self, seconds: float) -> dict[str, Any] | None:
        self.waited.append(seconds)
        if not self.words:
            return None
        if self.words[0] == "end":
            raise EOFError
        return {self.words.pop(0): True}

    def kill(self) -> None:
        self.heard.append("kill")

    def release(self) -> None:
        self.heard.append("release")

    def end(self) -> int:
        self.heard.append("end")
        return -9


class Kept:
    """A :class:`Ready` with processes of a test, and a clock that the test moves."""

    def __init__(self, *processes: Process, **settings: Any) -> None:
        self.now, self.full = 0.0, False
        self.left = list(processes)
        self.started: list[Process] = []
        self.ready = Ready(self.start, lambda: not self.full, clock=lambda: self.now, **settings)  # type: ignore[arg-type]

    def start(self) -> Process:
        self.started.append(self.left.pop(0))
        return self.started[-1]

    def later(self, seconds: float) -> None:
        """Let time pass, and the SuperExec look."""
        self.now += seconds
        self.ready.look()


def test_a_run_gets_the_process_that_is_ready_and_the_next_one_is_prepared_when_it_has_begun() -> None:
    first, second = Process("ready", "taken"), Process("ready", "taken")
    kept = Kept(first, second)
    kept.later(0)
    kept.later(1)
    assert kept.ready.held == 1
    assert kept.ready.take(RUN)
    assert first.heard == [RUN, {"go": True}, "release"]  # told once, and left alone from then on
    assert first.waited[-1] == ANSWER_S
    assert kept.ready.held == 0
    kept.later(SETTLE_S - 1)
    assert kept.started == [first]
    kept.later(2)
    assert kept.started == [first, second]
    assert kept.ready.take(RUN)
    assert first.heard[-1] == "release"


def test_a_run_that_comes_in_the_middle_of_the_imports_gets_the_process_too() -> None:
    process = Process("taken")
    kept = Kept(process)
    kept.later(0)
    assert kept.ready.take(RUN)
    assert process.waited == [PATIENCE_S]
    other = Process("ready", "taken")
    kept = Kept(other)
    kept.later(0)
    assert kept.ready.take(RUN)
    assert other.waited == [PATIENCE_S, ANSWER_S]


@pytest.mark.parametrize("words", [["ready"], ["ready", "end"], ["end"], [], ["ready", "ready", "ready"]])
def test_a_process_that_does_not_take_the_run_never_begins_it(words: list[str]) -> None:
    process = Process(*words)
    kept = Kept(process, Process("ready", "taken"))
    kept.later(0)
    assert not kept.ready.take(RUN)
    assert {"go": True} not in process.heard
    assert process.heard[-1] == "end"  # it is gone before Flower starts another one with the same token
    assert kept.ready.held == 0
    assert not kept.ready.take(RUN)
    kept.later(SETTLE_S)
    assert kept.ready.take(RUN)


def test_after_some_processes_that_ended_by_themselves_no_other_one_is_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept(*(Process("end") for _ in range(MOST_DEATHS)))
    for _ in range(MOST_DEATHS):
        kept.later(SETTLE_S)
        kept.later(1)
    kept.later(1000)
    assert not kept.ready.take(RUN)
    kept.later(1000)
    assert len(kept.started) == MOST_DEATHS
    assert "from now on" in caplog.messages[-1]


def test_deaths_count_in_a_row() -> None:
    words = [["end"], ["end"], ["ready", "taken"]] * 2
    kept = Kept(*(Process(*said) for said in words))
    for _ in range(2):
        for _ in range(2):
            kept.later(SETTLE_S)
            kept.later(1)
        kept.later(SETTLE_S)
        assert kept.ready.take(RUN)


def test_without_runs_its_memory_is_given_back_until_there_is_one_again() -> None:
    first = Process("ready")
    kept = Kept(first, Process("ready", "taken"), idle_s=100)
    kept.later(0)
    kept.later(99)
    assert kept.ready.held == 1
    kept.later(1)
    assert kept.ready.held == 0
    assert first.heard == ["kill", "end"]
    kept.later(1000)
    assert kept.ready.held == 0
    assert not kept.ready.take(RUN)
    kept.later(SETTLE_S)
    assert kept.ready.held == 1


def test_a_run_of_another_app_leaves_the_process_as_it_is() -> None:
    process = Process("ready", "taken")
    kept = Kept(process)
    kept.later(0)
    kept.ready.leave()
    assert process.heard == []
    kept.later(SETTLE_S)
    assert kept.ready.take(RUN)


def test_where_no_further_run_may_start_no_process_takes_memory() -> None:
    first = Process("ready")
    kept = Kept(first, Process("ready"))
    kept.full = True
    kept.later(0)
    assert not kept.started
    kept.full = False
    kept.later(1)
    kept.full = True
    kept.ready.leave()
    kept.later(1)
    assert first.heard == ["kill", "end"]
    kept.later(SETTLE_S)
    assert kept.ready.held == 0
    kept.full = False
    kept.later(1)
    assert kept.ready.held == 1


@pytest.mark.parametrize("other", [True, False])
def test_a_superexec_of_one_run_prepares_one_process(other: bool) -> None:
    process = Process("ready", "taken")
    kept = Kept(process, once=True)
    kept.later(0)
    if other:
        kept.ready.leave()
    else:
        assert kept.ready.take(RUN)
    assert process.heard[-1] == ("end" if other else "release")
    kept.later(1000)
    assert kept.started == [process]


def test_the_superexec_s_end_is_the_process_s() -> None:
    process = Process("ready")
    kept = Kept(process)
    kept.later(0)
    kept.ready.dismiss()
    kept.ready.dismiss()
    assert process.heard == ["kill", "end"]


def test_the_variable_names_one_of_three_ways() -> None:
    assert [switch(text) for text in (None, "", "on", "off", "once")] == ["on", "on", "on", "off", "once"]
    with pytest.raises(ValueError, match="FEDCROSS_READY=yes: give one of on, off, once"):
        switch("yes")
