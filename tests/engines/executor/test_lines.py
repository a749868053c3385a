"""What a caller can write into the SuperLink's log."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedcross.engines.executor import over
from fedcross.engines.executor.lines import OVER, STRAY, Strays, access, refusal


def record(text: str, *arguments: Any) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, text, arguments, None)


def test_a_query_of_any_length_is_a_short_part_of_one_line() -> None:
    line = record('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "POST", "/v1/x?" + "B" * 14_000 + "\n", "1.1", 401)
    assert access(line)
    told = line.getMessage()
    assert told.startswith('1.2.3.4:5 - "POST /v1/x?BBB')
    assert told.endswith('(13879 more) HTTP/1.1" 401')
    assert len(told) < 250


def test_a_usual_line_stays_as_it_is() -> None:
    line = record('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "POST", "/v1/fleet/pull-messages", "1.1", 401)
    before = line.getMessage()
    assert access(line)
    assert line.getMessage() == before


def test_what_flower_says_of_a_refusal_is_short_and_one_line() -> None:
    line = record(f"[/v1/fleet/get-run][ApiError:1002] Unsupported Content-Type: '{'A' * 15_000}\n\x1b[2J'")
    assert refusal(line)
    assert len(line.getMessage()) < 450
    assert line.getMessage().startswith("[/v1/fleet/get-run][ApiError:1002] Unsupported Content-Type: 'AAA")
    line = record("[/v1/fleet/get-run][ApiError:7] 50%\x1b[2J")
    assert refusal(line)
    assert line.getMessage() == "[/v1/fleet/get-run][ApiError:7] 50%?[2J"


def test_other_lines_of_flower_stay_whole() -> None:
    line = record("Traceback\n" + "x" * 1000)
    assert refusal(line)
    assert line.getMessage() == "Traceback\n" + "x" * 1000


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("[/v1/fleet/push-messages][ApiError:2007] SuperNode 1, exception: Run is finished. Stopped by user.", "INFO"),
        ("Invalid run ID for Message: 7", "INFO"),
        ("[/v1/fleet/get-fab][ApiError:2009] SuperNode 1, exception: Requested FAB hash a", "ERROR"),
        ("[/v1/runtime/pull-messages][ApiError:1008] Runtime task-token authentication failed.", "ERROR"),
    ],
)
def test_that_a_run_is_over_is_no_error(text: str, level: str) -> None:
    line = record(text)
    line.levelno, line.levelname = logging.ERROR, "ERROR"
    assert refusal(line)
    assert (line.levelname, line.levelno) == (level, getattr(logging, level))
    assert line.getMessage() == text


def test_flowers_code_for_a_run_that_is_over() -> None:
    assert OVER.match(f"[/v1/fleet/push-messages][ApiError:{over.CODE}]")


def test_what_is_no_request_is_told_once_a_minute() -> None:
    now = [100.0]
    strays, told = Strays(lambda: now[0]), []
    for second in (0, 0, 59, 61, 62):
        now[0] = 100.0 + second
        line = record("Invalid HTTP request received.")
        if strays(line):
            told.append((second, line.getMessage()))
    assert told == [
        (0, "Invalid HTTP request received."),
        (61, "Invalid HTTP request received. And 2 more since the last such line."),
    ]
    assert strays(record("Started server process [1]"))


def test_that_is_uvicorns_own_line() -> None:
    source = inspect.getsource(HttpToolsProtocol.data_received)
    assert f'"{STRAY}"' in source
    assert 'getLogger("uvicorn.error")' in inspect.getsource(HttpToolsProtocol.__init__)
