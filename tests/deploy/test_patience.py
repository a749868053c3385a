from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from fedcross.core.causes import PAGE
from fedcross.deploy import patience
from fedcross.engines import guarded

#: In a process of its own: the constants are Flower's, for all tests.
CODE = """
from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from fedcross.deploy import patience
import inspect
for module in (in_memory_corestate, sql_corestate):
    text = inspect.getsource(module)
    assert text.count("seconds=HEARTBEAT_DEFAULT_INTERVAL)") == 1, "how long may a start take?"
    assert text.count("HEARTBEAT_DEFAULT_INTERVAL") == 2 + text.count("HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL")
patience.be_patient()
for module in (in_memory_corestate, sql_corestate):
    print(module.HEARTBEAT_DEFAULT_INTERVAL, module.HEARTBEAT_PATIENCE * module.HEARTBEAT_DEFAULT_INTERVAL)
"""


def test_the_superlink_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, one small reply could take all of its memory."""
    became: list[str] = []
    monkeypatch.setattr(sys, "argv", ["patience.py", "flower-superlink", "--insecure"])
    monkeypatch.setattr(patience, "be_patient", lambda: None)

    def become(program: str) -> None:
        became.extend([program, *sys.argv])
        raise SystemExit(0)

    monkeypatch.setattr(guarded, "become", become)
    with pytest.raises(SystemExit):
        patience.main()
    assert became == ["flower-superlink", "flower-superlink", "--insecure"]


def test_a_port_that_was_taken_meanwhile_is_the_last_thing_said(monkeypatch, capsys) -> None:
    """Two SuperLinks that start at once both find the port free."""
    taken = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"

    def become(_: str) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.error(taken)
        logger.info("Application shutdown complete.")
        raise SystemExit(1)

    monkeypatch.setattr(sys, "argv", ["patience.py", "flower-superlink"])
    monkeypatch.setattr(patience, "be_patient", lambda: None)
    monkeypatch.setattr(guarded, "become", become)
    with pytest.raises(SystemExit):
        patience.main()
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [f"fedcross deploy: {taken}", f"Cause: port_taken ({PAGE})"]


@pytest.mark.slow
def test_a_start_may_take_five_minutes_and_a_silence_one() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "300 60.0\n" * 2, done.stderr
