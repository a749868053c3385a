"""Shared by all tests: nothing global leaks from one test into the next."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Listen to Ctrl-C even where a shell started the tests in the background, which ignores it.

    Processes inherit what is ignored, and several tests interrupt one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test its own client states, caches and Flower home."""
    monkeypatch.setenv("FEDCROSS_STATE", str(tmp_path / "client-states"))
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.delenv("FEDCROSS_PATH", raising=False)
    yield
    if "client.workshop" in sys.modules:
        sys.modules["client.workshop"]._open.clear()
        sys.modules["tasks.data"]._loaded.clear()
