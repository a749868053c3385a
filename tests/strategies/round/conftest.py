import pytest

from tests.support.virtual import Clock


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)
