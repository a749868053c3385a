"""The worker of a device: a real process, an app of ten lines."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedcross.engines.grid import FIRST_NODE, identify
from fedcross.engines.warm_device.launcher import Launcher
from fedcross.engines.warm_device.tasks import GoneError, Task

APP = """
import os
import sys
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict


class App:
    stays_loaded = True

    def __call__(self, message, context):
        asked = dict(message.content["config"])
        if asked["do"] == "raise":
            raise RuntimeError("on purpose")
        if asked["do"] == "die" or (asked["do"] == "die once" and not Path(asked["mark"]).exists()):
            Path(asked["mark"]).touch()
            os._exit(7)
        told = ConfigRecord({"pid": os.getpid(), "fedcross": "fedcross" in sys.modules})
        return Message(RecordDict({"config": told}), reply_to=message)


app = App()
"""


def bundle(app: str = APP) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("mine.py", app)
        archive.writestr("pyproject.toml", '[tool.flwr.app.components]\nclientapp = "mine:app"\n')
    return file.getvalue()


class Handed(Task):
    """A task whose SuperNode is this test."""

    def alive(self) -> None:
        """It is."""

    def reply(self, reply: Message, context: Context, fault: str = "") -> None:
        self.told = (reply, fault)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr("fedcross.engines.warm_device.launcher.Node", lambda _: SimpleNamespace(ended=False))
    made = Launcher([], None)  # type: ignore[arg-type]
    yield made
    made._dismiss()


def answer(launcher: Launcher, do: str, mark: Path, app: str = APP, ttl: float = 600) -> tuple[Any, str]:
    identify()
    message = Message(RecordDict({"config": ConfigRecord({"do": do, "mark": str(mark)})}), FIRST_NODE, "train", ttl=ttl)
    message.metadata.__dict__["_message_id"] = "1"
    task = Handed(message, Context(1, FIRST_NODE, {}, RecordDict(), {}), bundle(app), str(hash(app)), None)  # type: ignore[arg-type]
    launcher._answer(task)
    return task.told


def test_one_process_answers_many_messages_with_the_bundle_alone(launcher: Launcher, tmp_path: Path) -> None:
    first, _ = answer(launcher, "tell", tmp_path)
    second, fault = answer(launcher, "tell", tmp_path)
    assert first.content["config"]["pid"] == second.content["config"]["pid"]
    assert not first.content["config"]["fedcross"]
    assert fault == ""
    other, _ = answer(launcher, "tell", tmp_path, APP + "\n")
    assert other.content["config"]["pid"] != first.content["config"]["pid"]


@pytest.mark.slow
def test_an_app_that_does_not_stay_gets_a_process_for_each_message(launcher: Launcher, tmp_path: Path) -> None:
    app = APP.replace("stays_loaded = True", "pass")
    pids = {answer(launcher, "tell", tmp_path, app)[0].content["config"]["pid"] for _ in range(2)}
    assert len(pids) == 2


@pytest.mark.slow
def test_an_error_tells_its_type_file_and_line(launcher: Launcher, tmp_path: Path) -> None:
    reply, fault = answer(launcher, "raise", tmp_path)
    assert reply.error.code == 2
    assert "RuntimeError: on purpose" in reply.error.reason
    assert "mine.py, line" in reply.error.reason
    assert fault == reply.error.reason
    broken, _ = answer(launcher, "tell", tmp_path, "import nothing_such")
    assert "ModuleNotFoundError" in broken.error.reason


@pytest.mark.slow
def test_a_message_whose_process_died_is_tried_once_more(launcher: Launcher, tmp_path: Path) -> None:
    reply, _ = answer(launcher, "die once", tmp_path / "mark")
    assert not reply.has_error()
    reply, fault = answer(launcher, "die", tmp_path / "mark")
    assert reply.error.code == 8
    assert "exit code 7" in fault


def test_a_message_whose_time_is_over_is_given_up(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(GoneError):
        answer(launcher, "tell", tmp_path, "import time\ntime.sleep(60)", ttl=0.5)
