from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedcross.engines import guarded
from fedcross.engines.executor import flower_runtime, supervisor
from fedcross.engines.executor.crew import IDLE_S, Actions, Crew
from fedcross.engines.executor.flower_runtime import CLAIM_LOST, AwayError, RefusedError, Task
from tests.support.clock import Clock


class FakeWorker:
    """Says what its script says; an exception in it is raised."""

    def __init__(self, world: World, bundle: str) -> None:
        self.world, self.bundle = world, bundle
        self.handed: list[str] = []
        self.killed = False

    def hand(self, token: str) -> None:
        self.handed.append(token)

    def hear(self, seconds: float) -> dict[str, Any] | None:
        if seconds == 0:
            if self.world.dead_when_idle:
                raise EOFError
            return None
        if self.killed:
            raise EOFError
        said = self.world.script.pop(0) if self.world.script else None
        if said is None:
            self.world.now += seconds
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self) -> None:
        self.killed = True

    def end(self) -> int:
        self.world.ended.append(self.bundle)
        return -9 if self.killed else self.world.exit_code


class World:
    """Everything outside of the supervisor."""

    def __init__(self, *script: dict[str, Any] | Exception | None) -> None:
        self.script = list(script)
        self.now, self.exit_code, self.dead_when_idle = 1000.0, 0, False
        self.started: list[FakeWorker] = []
        self.ended: list[str] = []
        self.reports: list[tuple[str, str, str]] = []
        self.signs: list[float] = []
        self.left_to_flower: list[str] = []

    def crew(self, idle_s: float = 60.0) -> Crew:
        def start(bundle: str) -> FakeWorker:
            self.started.append(FakeWorker(self, bundle))
            return self.started[-1]

        def report(token: str, text: str, why: str) -> bool:
            self.reports.append((token, text, why))
            return True

        @contextlib.contextmanager
        def flower(token: str) -> Iterator[Any]:
            self.left_to_flower.append(token)
            yield SimpleNamespace(poll=lambda: 0)

        alive = lambda token: self.signs.append(self.now)  # noqa: E731
        actions = Actions("a", start, report, alive, flower, lambda: self.now)  # type: ignore[arg-type]
        return Crew(actions, idle_s)


def test_the_executor_knows_the_versions_that_the_rest_knows() -> None:
    assert tuple(one.rpartition(".")[0] for one in guarded.CHECKED) == flower_runtime.CHECKED
    assert flower_runtime.known()


PULLED, PUSHED, DONE = {"pulled": "head", "seconds": 100.0}, {"pushed": True}, {"done": True, "stays": True}


def task(number: int = 1, bundle: str = "b1") -> Task:
    return Task(number, 7, bundle, f"t{number}")


def never() -> bool:
    return False


def test_one_worker_does_the_tasks_of_one_bundle() -> None:
    world = World(PULLED, DONE, PULLED, DONE)
    crew = world.crew()
    crew.do(task(1), never)
    crew.do(task(2), never)
    [worker] = world.started
    assert worker.handed == ["t1", "t2"]
    assert world.ended == world.reports == []


def test_another_bundle_gets_another_process() -> None:
    world = World(PULLED, DONE, PULLED, DONE)
    crew = world.crew()
    crew.do(task(1, "b1"), never)
    crew.do(task(2, "b2"), never)
    assert [one.bundle for one in world.started] == ["b1", "b2"]
    assert world.ended == ["b1"]


def test_the_server_hears_of_a_worker_that_died_and_the_next_task_gets_a_new_one() -> None:
    world = World(PULLED, EOFError(), PULLED, DONE)
    world.exit_code = -9
    crew = world.crew()
    crew.do(task(1), never)
    assert world.reports == [("t1", "head", "The worker process ended while it worked on this message (signal 9).")]
    assert crew.ready  # one death may be chance
    crew.do(task(2), never)
    assert len(world.started) == 2
    assert crew.deaths == 0


def test_a_message_that_was_answered_is_not_answered_again() -> None:
    world = World(PULLED, PUSHED, EOFError())
    crew = world.crew()
    crew.do(task(), never)
    assert world.reports == []
    assert crew.worker is None
    assert crew.deaths == 1


def test_a_worker_whose_task_was_taken_away_has_not_died() -> None:
    world = World(PULLED, EOFError())
    world.exit_code = CLAIM_LOST
    crew = world.crew()
    crew.do(task(), never)
    assert world.reports == []
    assert (crew.worker, crew.deaths) == (None, 0)


def test_workers_that_keep_dying_are_started_less_and_less_often() -> None:
    world = World(*[EOFError()] * 8)
    crew = world.crew()
    waits = []
    for number in range(8):
        crew.do(task(number), never)
        waits.append(crew.not_before - world.now)
        assert crew.ready == (waits[-1] == 0)
        world.now = crew.not_before
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert [text for _, text, _ in world.reports] == [""] * 8


def test_signs_of_life_go_on_while_a_worker_works() -> None:
    world = World(PULLED, *[None] * 40, DONE)
    world.crew().do(task(), never)
    assert world.signs == [1015.0, 1030.0]


def test_a_worker_that_takes_longer_than_the_message_lives_is_killed() -> None:
    world = World({"pulled": "head", "seconds": 5.0}, *[None] * 5)
    crew = world.crew()
    crew.do(task(), never)
    assert world.started[0].killed
    assert world.reports[0][2].endswith("(signal 9).")


def test_a_worker_that_never_takes_the_next_message_is_killed_and_the_server_hears_of_it() -> None:
    world = World(PULLED, PUSHED, DONE)  # then it hangs while it loads the run
    crew = world.crew(idle_s=2 * IDLE_S)
    crew.do(task(1), never)
    handed = world.now
    crew.do(task(2), never)
    assert world.started[0].killed
    assert world.now - handed == 2 * IDLE_S
    assert [(token, head) for token, head, _ in world.reports] == [("t2", "")]
    world.script = [PULLED, DONE]
    crew.do(task(3), never)
    assert world.started[1].handed == ["t3"]


def test_a_worker_gets_half_an_hour_to_load_a_run_however_soon_an_idle_one_ends() -> None:
    world = World(*[None] * (int(IDLE_S) - 1), PULLED, DONE)
    world.crew(idle_s=1).do(task(), never)
    assert world.reports == []


def test_a_worker_that_has_taken_a_message_waits_for_its_objects_without_an_end() -> None:
    world = World({"taken": True}, *[None] * int(2 * IDLE_S), PULLED, DONE)
    world.crew().do(task(), never)
    assert world.reports == []


def test_a_task_ends_with_its_supernode() -> None:
    world = World(PULLED)
    world.crew().do(task(), lambda: True)
    assert world.reports == []


def test_flower_gets_the_messages_of_an_app_that_is_not_made_to_stay() -> None:
    world = World(PULLED, {"done": False, "stays": False})
    crew = world.crew()
    crew.do(task(1, "theirs"), never)
    assert crew.worker is None
    crew.do(task(2, "theirs"), never)
    assert world.left_to_flower == ["t2"]
    assert len(world.started) == 1


def test_an_idle_worker_gives_its_memory_back() -> None:
    world = World(PULLED, DONE)
    crew = world.crew(idle_s=60)
    crew.do(task(), never)
    world.now += 59
    crew.rest()
    assert crew.worker is not None
    world.now += 1
    crew.rest()
    assert crew.worker is None
    assert world.ended == ["b1"]


def test_a_worker_that_died_between_two_messages_is_replaced() -> None:
    world = World(PULLED, DONE, PULLED, DONE)
    crew = world.crew()
    crew.do(task(1), never)
    world.dead_when_idle = True
    crew.rest()
    crew.do(task(2), never)
    assert len(world.started) == 2
    assert world.reports == []


class FakeNode:
    """A SuperNode that ends after `looks` looks at it, and writes to its log when `writes` says so."""

    def __init__(self, looks: int, *writes: bool) -> None:
        self.looks, self.writes, self.told = looks, list(writes), False
        self.waits: list[float] = []

    def ended(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, seconds: float) -> bool:
        self.waits.append(round(seconds, 6))
        return self.writes.pop(0) if self.writes else False

    def end(self) -> int:
        self.told = True
        return 5


class FakeDoor:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def acquire(self) -> Task | None:
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]


def test_a_supernode_that_is_not_there_is_asked_again_and_its_end_ends_the_supervisor() -> None:
    world = World(PULLED, DONE)
    node = FakeNode(4)
    code = supervisor.serve(node, FakeDoor(AwayError(), None, task(), None), world.crew())  # type: ignore[arg-type]
    assert code == 5
    assert node.waits == [2.0, 0.02, 0.02]
    assert world.started[0].handed == ["t1"]
    assert world.ended == ["b1"]


def test_a_supernode_that_never_answers_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        many = [AwayError("status 404")] * supervisor.AWAY_LOOKS
        supervisor.serve(FakeNode(len(many)), FakeDoor(*many), World().crew())  # type: ignore[arg-type]
    finally:
        logger.removeHandler(caplog.handler)
    told = {record.getMessage() for record in caplog.records}
    assert told == {"fedcross: the SuperNode hands out no tasks: status 404"}


def test_the_supernode_is_asked_often_only_after_it_has_written_to_its_log() -> None:
    node = FakeNode(9, *[False] * 6, True)
    supervisor.serve(node, FakeDoor(*[None] * 9), World().crew())  # type: ignore[arg-type]
    assert node.waits == [0.02, 0.06, 0.18, 0.54, 1.62, 2.0, 2.0, 0.02, 0.06]


def test_a_refused_secret_ends_the_device_with_a_code_of_its_own() -> None:
    node = FakeNode(3)
    assert supervisor.serve(node, FakeDoor(RefusedError("401")), World().crew()) == supervisor.REFUSED  # type: ignore[arg-type]
    assert node.told


def test_a_device_that_is_cut_off_is_in_the_log_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(supervisor, "log", lambda _, text, *values: told.append(text % values))
    clock, answered = Clock(), None
    watch = supervisor.Watch(lambda: answered, clock.monotonic)
    for _ in range(100):
        watch.look()
        clock.sleep(10)
    silent = "fedcross: no answer of the SuperLink for %d s; this device is cut off"
    assert told == [silent % seconds for seconds in (100, 210, 430, 870)]
    answered = 995.0
    watch.look()
    watch.look()
    assert told[4:] == ["fedcross: the SuperLink answers again"]
    clock.now = 1100.0
    watch.look()
    assert told[5:] == [silent % 105]


def test_the_link_is_looked_at_before_each_question() -> None:
    looks: list[int] = []
    supervisor.serve(FakeNode(3), FakeDoor(None, None, None), World().crew(), lambda: looks.append(1))  # type: ignore[arg-type]
    assert len(looks) == 3
