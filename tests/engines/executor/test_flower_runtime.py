from __future__ import annotations

import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects

from fedcross.engines.executor.flower_runtime import STALLED_S, unless_stalled


def test_a_message_whose_objects_never_come_is_given_up_and_a_slow_one_is_not() -> None:
    """Flower itself would ask for them for two hours."""
    now, there = [0.0], {"a": b"1"}

    def pull(name: str) -> bytes:
        now[0] += 20
        if name not in there:
            raise ObjectUnavailableError(name)
        return there[name]

    patient = unless_stalled(pull, lambda: now[0])
    for name in ("b", "a", "b", "c", "a", "b", "c"):  # one object a minute is slow, not lost
        if name in there:
            assert patient(name) == b"1"
        else:
            with pytest.raises(ObjectUnavailableError):
                patient(name)
    with pytest.raises(ObjectPullError, match=f"nothing for {STALLED_S:.0f} s"):
        pull_objects(["b"], patient, initial_backoff=0.0)
