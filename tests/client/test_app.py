"""The ClientApp in the worker of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedcross.client import app as module
from fedcross.client import cache, request
from fedcross.conf.compose import join
from fedcross.core.errors import DataError, DeviceError
from fedcross.engines.grid import identify
from fedcross.engines.warm_device import worker

ASKED = {"run": "r", "round": 1, "exchange": 0, "client": 2, "slot": 0, "nonce": "n"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> module.Client:
    identify()
    monkeypatch.setattr(module.app, "sound", True)
    monkeypatch.setattr("sys.argv", [worker.NAME])
    return module.app


def answer(app: module.Client, kind: str = "train") -> Message:
    message = Message(RecordDict({"config": ConfigRecord(dict(ASKED))}), dst_node_id=1, message_type=kind)
    context = SimpleNamespace(node_config={"partition-id": 2}, run_config={"overrides": "task=digits"})
    return app(message, context)  # type: ignore[arg-type]


def test_the_worker_finds_what_it_asks_of_an_app(app: module.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cache, "run_cache", asked.append)
    app.prepare(SimpleNamespace(node_config={}, run_config={"overrides": "task=digits"}))  # type: ignore[arg-type]
    assert asked == ["task=digits"]
    assert app.stays_loaded
    assert app.sound
    assert worker.NAME == module.EXECUTOR


@pytest.mark.parametrize(
    ("error", "sound"), [(DataError("no data"), True), (DeviceError("broken"), False), (ValueError("odd"), False)]
)
def test_an_error_travels_with_its_nonce_and_tells_whether_the_process_is_sound(
    app: module.Client, monkeypatch: pytest.MonkeyPatch, error: Exception, sound: bool
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(request, "LocalClient", fails)
    told = dict(answer(app).content["config"])
    assert (told["nonce"], told["error"]) == ("n", type(error).__name__)
    assert app.sound is sound


def test_in_one_process_with_the_server_errors_stay_errors(app: module.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise DataError("no data")

    monkeypatch.setattr("sys.argv", ["fedcross"])
    monkeypatch.setattr(request, "LocalClient", fails)
    with pytest.raises(DataError, match="no data"):
        answer(app)


def test_a_device_answers_whatever_the_servers_own_settings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the run that goes on is the server's: there is none on the device."""
    monkeypatch.setattr(cache, "_open", {})
    monkeypatch.setattr(cache, "RunCache", lambda config: config)
    config = cache.run_cache(join(["task=digits", "resume=/srv/runs/a"]))
    assert (config.names["task"], config.resume) == ("digits", None)
