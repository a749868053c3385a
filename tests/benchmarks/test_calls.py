"""Operator calls of a step, which decide how long the host takes on a GPU; counted, not timed."""

import pytest

from benchmarks.calls import counted


# Six clients are held to more than the ten of the table: what all share is divided by fewer.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "clients"), [("lenet5", 3), ("resnet20", 6)])
def test_a_batched_step_calls_fewer_operations_for_each_client(model, clients, monkeypatch):
    monkeypatch.setattr("benchmarks.calls.BATCH", 2)  # examples cost time, not calls
    found = counted(model, clients)
    alone = found.pop("one client")
    assert set(found) == {"batched", "batched, recorded"}
    for calls, compute in found.values():
        assert calls <= 1.5 * alone[0] * clients
        assert compute <= 0.75 * alone[1] * clients
