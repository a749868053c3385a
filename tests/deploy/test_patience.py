from __future__ import annotations

import subprocess
import sys

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


def test_a_start_may_take_five_minutes_and_a_silence_one() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "300 60.0\n" * 2, done.stderr
