from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcross.engines.executor import program
from fedcross.engines.executor.worker import Worker

#: A task that the SuperNode takes away before all of its message has come.
GIVEN_UP = ("", "")


class App:
    """A ClientApp that notes what it was asked."""

    def __init__(self, **attributes: Any) -> None:
        self.asked: list[str] = []
        self.prepared: list[str] = []
        self.__dict__.update(attributes)

    def __call__(self, *, message: Any, context: Any) -> str:
        self.asked.append(message.text)
        if message.text == "fail":
            raise ZeroDivisionError("by zero")
        if message.text == "hurt":
            self.sound = False
        return f"reply to {message.text}"

    def prepare(self, context: str) -> None:
        self.prepared.append(context)


class Visits:
    """Tasks by token, and what became of them."""

    def __init__(self, app: App, **tasks: tuple[str, str]) -> None:
        self.app, self.tasks = app, tasks
        self.loaded = 0
        self.done: list[tuple[Any, ...]] = []
        self.said: list[dict[str, Any]] = []

    def worker(self) -> Worker:
        return Worker(lambda token: Visit(self, token), lambda message, error: f"error {error}", self.said.append)  # type: ignore[arg-type,return-value]


class Visit:
    def __init__(self, visits: Visits, token: str) -> None:
        self.all, self.token = visits, token

    def pull(self) -> tuple[Any, str]:
        if self.token not in self.all.tasks:
            raise OSError("the object is not there")
        if self.all.tasks[self.token] == GIVEN_UP:
            raise KeyboardInterrupt
        text, bundle = self.all.tasks[self.token]
        message = SimpleNamespace(text=text, metadata=SimpleNamespace(ttl=7.0))
        return SimpleNamespace(message=message, context="c", fab=SimpleNamespace(hash_str=bundle)), f"head of {text}"

    def load(self, given: Any) -> App:
        self.all.loaded += 1
        return self.all.app

    def push(self, reply: Any) -> None:
        self.all.done.append(("reply", reply))

    def finish(self, context: Any, fault: str = "") -> None:
        self.all.done.append(("end", context, fault))

    def close(self) -> None:
        self.all.done.append(("closed",))


def test_one_loaded_app_answers_one_message_after_another() -> None:
    app = App(stays_loaded=True)
    visits = Visits(app, t1=("a", "b1"), t2=("b", "b1"))
    worker = visits.worker()
    assert worker.answer("t1")
    taken, pulled = {"taken": True}, {"pulled": "head of a", "seconds": 7.0}
    assert visits.said == [taken, pulled, {"pushed": True}, {"done": True, "stays": True}]
    assert worker.answer("t2")
    assert visits.loaded == 1
    assert app.asked == ["a", "b"]
    assert app.prepared == ["c", "c"]
    assert visits.done[3:] == [("reply", "reply to b"), ("end", "c", ""), ("closed",)]


def test_a_worker_never_answers_with_another_bundles_app() -> None:
    app = App(stays_loaded=True)
    visits = Visits(app, t1=("a", "b1"), t2=("b", "b2"))
    worker = visits.worker()
    worker.answer("t1")
    assert not worker.answer("t2")
    assert app.asked == ["a"]
    assert visits.done[-3] == ("reply", "error a worker for one app got a message for another one")


def test_an_app_that_does_not_say_that_it_may_stay_gets_one_message_per_process() -> None:
    app = App()
    visits = Visits(app, t1=("a", "b1"))
    assert not visits.worker().answer("t1")
    assert visits.said[-1] == {"done": False, "stays": False}
    assert visits.done == [("reply", "reply to a"), ("end", "c", ""), ("closed",)]
    assert app.prepared == []


@pytest.mark.parametrize(("text", "fault"), [("fail", "<class 'ZeroDivisionError'>:<'by zero'>"), ("hurt", "")])
def test_after_an_error_the_next_message_gets_a_new_process(text: str, fault: str) -> None:
    visits = Visits(App(stays_loaded=True), t1=(text, "b1"))
    assert not visits.worker().answer("t1")
    assert visits.said[-1] == {"done": False, "stays": True}
    assert visits.done[1] == ("end", "c", fault)


def test_a_message_that_cannot_be_had_ends_the_task_and_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    visits = Visits(App(stays_loaded=True))
    with pytest.raises(OSError, match="not there"):
        visits.worker().answer("t1")
    [line] = [one for one in caplog.records if "was lost" in one.getMessage()]
    assert line.getMessage().endswith("OSError: the object is not there")
    assert line.exc_info is None  # no traceback: the run has ended
    assert visits.done == [("end", None, "OSError: the object is not there"), ("closed",)]
    assert visits.said == [{"taken": True}]


def test_a_message_that_is_given_up_before_it_has_come_ends_no_worker() -> None:
    visits = Visits(App(stays_loaded=True), t1=GIVEN_UP, t2=("a", "b1"), t3=GIVEN_UP)
    worker = visits.worker()
    assert worker.answer("t1")
    assert (visits.said, visits.done) == ([{"taken": True}, {"done": True, "stays": True}], [("closed",)])
    assert worker.answer("t2")
    assert worker.answer("t3")
    assert visits.loaded == 1


def test_a_task_that_is_taken_away_while_it_is_worked_on_ends_the_worker() -> None:
    class Stopped(App):
        def __call__(self, *, message: Any, context: Any) -> str:
            raise KeyboardInterrupt

    visits = Visits(Stopped(stays_loaded=True), t1=("a", "b1"))
    with pytest.raises(KeyboardInterrupt):
        visits.worker().answer("t1")
    assert visits.done == [("closed",)]


def test_an_app_that_cannot_prepare_still_answers_the_next_message() -> None:
    def fails(context: str) -> None:
        raise ValueError("no data")

    app = App(stays_loaded=True, prepare=fails)
    worker = Visits(app, t1=("a", "b1"), t2=("b", "b1")).worker()
    assert worker.answer("t1")
    assert worker.answer("t2")


@pytest.mark.slow
def test_no_part_of_fedcross_is_imported_before_the_bundle_is(tmp_path: Path) -> None:
    """Else a device would answer with its own fedcross, and not with the one that the server sent."""
    code = (
        "import runpy, sys\n"
        "sys.argv = ['program.py', 'worker']\n"
        "try:\n"
        f"    runpy.run_path({str(Path(program.__file__))!r}, run_name='__main__')\n"
        "except (SystemExit, IndexError):\n"
        "    pass\n"
        "print(sorted(name for name in sys.modules if 'fedcross' in name or name == 'torch'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    names = ("", ".flower_runtime", ".whole", ".worker")
    assert done.stdout.strip() == str([f"_fedcross_executor{name}" for name in names])


def test_only_the_parts_of_the_executor_can_be_started() -> None:
    with pytest.raises(SystemExit, match="nothing: start one of supervisor, node, worker"):
        program.main([])
