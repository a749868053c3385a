"""Memory over many rounds: a run must not grow."""

import gc

import numpy as np
import pytest

from tests.support.federation import session
from tests.support.scale import rss, size

ROUNDS = size(60, 500)
LIMIT = 2**20  # bytes per 100 rounds


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rounds(tmp_path):
    """Server and clients in one process, with log and checkpoints: the slope of a line through its RSS."""
    ready = session(tmp_path, f"rounds={ROUNDS}", "task.limit=60", "evaluate_every=10", "checkpoint.log=true")
    seen = []
    count = ready.checkpoints.save

    def counted(number, *rest):
        count(number, *rest)
        if number % 10 == 0:
            gc.collect()
            seen.append((number, rss()))

    ready.checkpoints.save = counted
    ready.execute()
    numbers, sizes = np.array(seen[len(seen) // 5 :], float).T  # the first fifth warms caches up
    slope = float(np.polyfit(numbers, sizes, 1)[0]) * 100
    print(f"{ROUNDS} rounds, RSS {sizes[0] / 2**20:.1f} to {sizes[-1] / 2**20:.1f} MiB, {slope / 2**20:.3f} MiB/100")
    assert slope < (LIMIT if ROUNDS >= 500 else 8 * LIMIT)
