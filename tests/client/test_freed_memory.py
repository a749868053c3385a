"""What a process frees, it keeps for its next step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedcross.client import device as freed_memory

#: Trains ResNet-20 for six steps; prints the page faults of each of the last three.
PROGRAM = """
import resource, sys
from types import SimpleNamespace
import torch
from fedcross.client.device import keep_freed_memory
from fedcross.tasks.models import create
if "keep" in sys.argv:
    assert keep_freed_memory()
torch.set_num_threads(1)
network = create("resnet20", {}, SimpleNamespace(shape=(3, 32, 32), classes=10, vocabulary=0), 1)
x, y = torch.randn(50, 3, 32, 32), torch.zeros(50, dtype=torch.int64)
for number in range(6):
    if number == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    network.zero_grad()
    torch.nn.functional.cross_entropy(network(x), y).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


def faults(*arguments: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in freed_memory.ALLOCATOR}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc has the setting")
def test_memory_that_was_freed_costs_no_new_pages():
    """A step of this size faulted on 5,000 to 8,000 pages of 4 KiB where the C library decided."""
    assert faults("keep") < 1500


@pytest.mark.parametrize("name", freed_memory.ALLOCATOR)
def test_a_user_s_own_choice_stands(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("called"))
    assert not freed_memory.keep_freed_memory()
