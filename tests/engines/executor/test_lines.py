"""What a caller can write into the SuperLink's log."""

from __future__ import annotations

import logging
from typing import Any

from fedcross.engines.executor.lines import access, refusal


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
