from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from fedcross.engines.executor import superexec
from fedcross.engines.executor.ready import Ready


def spec(task: int = 7, kind: TaskType = TaskType.SERVER_APP, **changes: Any) -> ExecutionSpec:
    settings = {"runtime_api_address": "h:1", "token": "t", "insecure": False, "root_certificates_path": "ca.crt"}
    settings |= {"runtime_dependency_install": False, "parent_pid": 11, "suppress_output": True}
    return ExecutionSpec(task_type=kind, task_id=task, **(settings | changes))


class Kept:
    """Stands for :class:`Ready`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.takes = True

    def look(self) -> None:
        self.calls.append("look")

    def take(self, given: Any) -> bool:
        self.calls.append(("take", given["token"]))
        return self.takes

    def leave(self) -> None:
        self.calls.append("leave")

    def dismiss(self) -> None:
        self.calls.append("dismiss")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Flower's SuperExec with something in front, which a test may break."""
    made = Kept()

    def acquire(client: Any, request: Any) -> Any:
        task = SimpleNamespace(task_id=request, run_id=request + 100)
        return SimpleNamespace(HasField=lambda name: request > 0, task=task)

    def launch(executor: Any, found: ExecutionSpec) -> str:
        made.calls.append(("Flower", found.token))
        return "Flower's"

    monkeypatch.setattr(RuntimeHttpClient, "AcquireTask", acquire)
    for name, call in {"launch": launch, "close": lambda executor: None, "reconcile": lambda executor: None}.items():
        monkeypatch.setattr(SubprocessExecutor, name, call)
    superexec.attach(made)  # type: ignore[arg-type]
    monkeypatch.setattr(superexec, "app_of", lambda given, run: superexec.OWN if run == 107 else "")
    return made


def test_a_run_of_ours_goes_to_the_ready_process_and_to_flower_if_that_does_not_take_it(kept: Kept) -> None:
    flower = SubprocessExecutor()
    RuntimeHttpClient.AcquireTask(None, 7)  # type: ignore[arg-type]
    assert flower.launch(spec()) == LaunchResult.accepted()
    assert kept.calls == [("take", "t")]
    kept.takes = False
    assert flower.launch(spec()) == "Flower's"  # type: ignore[comparison-overlap]
    assert kept.calls[1:] == [("take", "t"), ("Flower", "t")]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (8, spec(8)),  # another app
        (9, spec(7)),  # a task that was not handed out last
        (0, spec(7)),
        (7, spec(7, TaskType.CLIENT_APP)),
        (7, spec(7, runtime_dependency_install=True)),
    ],
)
def test_what_is_not_a_run_of_ours_is_left_to_flower(kept: Kept, asked: int, wanted: ExecutionSpec) -> None:
    RuntimeHttpClient.AcquireTask(None, 7)  # type: ignore[arg-type]
    RuntimeHttpClient.AcquireTask(None, asked)  # type: ignore[arg-type]
    assert SubprocessExecutor().launch(wanted) == "Flower's"  # type: ignore[comparison-overlap]
    assert kept.calls == ["leave", ("Flower", "t")]


def test_flowers_loop_looks_after_the_process_and_ends_it(kept: Kept) -> None:
    SubprocessExecutor().reconcile()
    SubprocessExecutor().close()
    assert kept.calls == ["look", "dismiss"]


def test_the_process_gets_what_flowers_command_would_get() -> None:
    own = ["--runtime-api-address", "h:1"]
    assert superexec.task_of(spec()) == {
        "token": "t",
        "arguments": [*own, "--root-certificates", "ca.crt", "--parent-pid", "11"],
        "silent": True,
    }
    plain = superexec.task_of(spec(insecure=True, root_certificates_path=None, parent_pid=None, suppress_output=False))
    assert plain == {"token": "t", "arguments": [*own, "--insecure"], "silent": False}


def test_the_superlink_says_whose_app_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {7: SimpleNamespace(fab_id="fedcross/fedcross")}

    def ask(client: Any, request: Any) -> Any:
        if request.run_id == 9:
            raise httpx.ConnectError("away")
        return SimpleNamespace(run_dict=runs)

    monkeypatch.setattr(ControlHttpClient, "ListRuns", ask)
    plain = spec(insecure=True, root_certificates_path=None)
    assert [superexec.app_of(plain, run) for run in (7, 8, 9, None)] == ["fedcross/fedcross", "", "", ""]
    assert superexec.app_of(spec(root_certificates_path=str(tmp_path / "no.crt")), 7) == ""


def test_the_keeper_reads_how_long_a_process_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(superexec.IDLE, "12")
    made = superexec.keeper("once", lambda: False)
    assert isinstance(made, Ready)
    assert (made.idle_s, made.once, made.room()) == (12.0, True, False)
