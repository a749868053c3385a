from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedcross.engines.executor import closing


@pytest.fixture(autouse=True)
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "ENDING", threading.Event())


def stream(_request: Any, _account: Any, _state: Any, is_active: Callable[[], bool] | None = None) -> Iterator[int]:
    """As Flower's: it goes on as long as somebody listens."""
    number = 0
    while is_active is None or is_active():
        yield number
        number += 1


def test_a_stream_ends_when_the_superlink_is_asked_to_end() -> None:
    signals: list[int] = []
    lines = closing.while_up(stream)("run", "account", "state")
    assert [next(lines), next(lines)] == [0, 1]
    closing.noted(signals.append)(15)
    assert list(lines) == []
    assert signals == [15]


def test_a_stream_that_nobody_listens_to_ends_as_before() -> None:
    here = iter([True, False])
    assert list(closing.while_up(stream)("run", "account", "state", lambda: next(here))) == [0]
