"""Flower's client of a run's messages, watched: what is too long is not read, who is busy is asked again."""

from types import SimpleNamespace

import httpx
import pytest

from fedcross.core.errors import UploadError
from fedcross.engines import object_client as module
from fedcross.engines.object_client import ObjectClient, patiently
from tests.support.clock import Clock


def test_an_answer_that_is_too_long_is_refused_before_it_is_read():
    hooks = []
    link = SimpleNamespace(_client=SimpleNamespace(event_hooks={"response": hooks}))
    objects = ObjectClient(SimpleNamespace(_runtime_client=link))
    assert objects.client is link
    (hook,) = hooks
    assert objects.client is link
    assert len(hooks) == 1
    hook(httpx.Response(200, headers={"content-length": "99999999"}))  # no object: a list of replies, say
    objects._limit.most = 1000
    hook(httpx.Response(200, headers={"content-length": "1000"}))
    with pytest.raises(UploadError, match="too_large"):
        hook(httpx.Response(200, headers={"content-length": "2000"}))


def status(code):
    return httpx.HTTPStatusError("", request=httpx.Request("POST", "http://h"), response=httpx.Response(code))


def test_a_busy_superlink_is_asked_again_and_a_refusal_is_a_refusal(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    outcomes = [status(503), status(500), None]

    def call():
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return 5

    assert patiently(call) == 5
    outcomes = [status(403)]
    with pytest.raises(httpx.HTTPStatusError):
        patiently(call)
    outcomes = [status(500)] * 1000
    with pytest.raises(httpx.HTTPStatusError):
        patiently(call)
    assert clock.now > module.BUSY_S
