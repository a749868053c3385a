"""What the ServerApp says of an error; tests/faults has its runs."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fedcross.core.errors import ConfigError
from fedcross.core.overrides import join
from fedcross.server import app
from fedcross.strategies.round import nodes


def flower(main: Any, *given: object) -> None:
    """Do with an error what Flower 1.41 and 1.42 do (``flwr/superlink/runtime/run_serverapp.py``)."""
    try:
        main(*given)
    except ConfigError as error:
        logging.getLogger("flwr").error("%s raised an exception", "ServerApp", exc_info=error)  # noqa: TRY400 - as there


def test_a_moved_runs_error_is_words_that_name_the_way_on_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/opt/bin/{app.PROGRAM}"])
    monkeypatch.setattr(nodes, "simulated", lambda _: False)
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "propagate", True)
    remote = ["engine=remote", "engine.address=fl:8000", "engine.authority=ca.crt"]
    flower(app.main, None, SimpleNamespace(run_config={"overrides": join(["task=digits", *remote, "resume=/old/a"])}))
    (record,) = [one for one in caplog.records if "raised" in one.getMessage()]
    assert record.getMessage() == (
        "ServerApp raised an exception: ConfigError: resume=/old/a: no such run folder. Name the folder of a run. If "
        "it lies elsewhere at the server now, name its new place: fedcross deploy resume RUN resume=DIR, or fedcross "
        "resume=DIR engine.authority=FILE."
    )
    assert "Traceback" not in caplog.text


def test_an_error_that_is_nobodys_words_keeps_its_traceback() -> None:
    error = KeyError("x")
    record = logging.LogRecord("flwr", 40, "", 1, "%s raised", ("ServerApp",), (KeyError, error, None))
    assert app.plain(record)
    assert record.exc_info is not None
    assert record.getMessage() == "ServerApp raised"
