"""How a run's process ended, in the SuperExec's log."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedcross.engines.executor import ended as module
from fedcross.engines.executor.ended import Ended, how


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (2, "ended with exit code 2"),
        (-15, "was ended by signal 15 (SIGTERM)"),
        (-9, "was ended by signal 9 (SIGKILL): too little memory, or by hand"),
        (-99, "was ended by signal 99 (?)"),
    ],
)
def test_in_words(code: int, told: str) -> None:
    assert how(code) == told


class Process:
    def __init__(self, code: int | None) -> None:
        self.pid, self.code = 42, code

    def poll(self) -> int | None:
        return self.code


def test_each_end_is_told_once_and_a_good_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    ended, killed = Ended(), Process(None)
    ended.watch(killed, "task 7")
    ended.watch(Process(0), "task 8")
    ended.look()
    assert not caplog.records
    killed.code = -9
    for _ in range(3):
        ended.look()
    [line] = [one.getMessage() for one in caplog.records]
    assert line.startswith("fedcross: the process of task 7 (pid 42) was ended by signal 9 (SIGKILL)")


def test_the_processes_that_flower_starts_are_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        assert arguments[:2] == ["python", "guarded.py"]
        assert arguments[3:6] == ["h:1", "--token", "t"]
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"]))
        return started[0]

    for name in ("launch", "reconcile"):
        monkeypatch.setattr(SubprocessExecutor, name, getattr(SubprocessExecutor, name))  # restored at the end
    monkeypatch.setattr(module, "start", start)
    module.attach(Ended(), {"flwr-serverapp": ["python", "guarded.py"]})
    executor = SubprocessExecutor()
    executor.launch(
        ExecutionSpec(
            task_type=TaskType.SERVER_APP,
            task_id=7,
            runtime_api_address="h:1",
            token="t",
            insecure=True,
            root_certificates_path=None,
            runtime_dependency_install=False,
            parent_pid=1,
            suppress_output=False,
        )
    )
    assert subprocess_executor.subprocess is subprocess  # type: ignore[attr-defined]
    started[0].wait()
    executor.reconcile()
    assert "the process of task 7 (pid" in caplog.text
    assert "ended with exit code 3" in caplog.text
