import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.command import python
from tests.support.killer import ACCEPTED, DRAWN, POINTS, ROUNDS
from tests.support.scale import WHOLE, size

ROOT = Path(__file__).parents[2]
#: Rounds to die in, for every point; in the first there is no checkpoint yet, and so nothing to resume from.
CASES = [[point, 2 + trial % (ROUNDS - 1)] for trial in range(size(1, 5)) for point in POINTS]


# SCAFFOLD's clients keep a state of their own on disk, FedCross has the pool.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcross", "scaffold"] if WHOLE else ["fedcross"])
def test_a_killed_run_ends_as_one_that_was_left_in_peace(tmp_path, method):
    cases = [case for case in CASES if method == "fedcross" or case[0] != "mixing"]  # one model: nothing to mix
    done = python(
        *["-m", "tests.support.killer", str(tmp_path), json.dumps(cases), f"method={method}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=600 if not WHOLE else 3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole, *found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert len(found) == len(cases)
    for case in found:
        where = (case["point"], case["round"])
        assert case["signal"] == signal.SIGKILL, where
        assert case["status"] == 0, where
        assert case["digest"] == whole["digest"], where
        assert case["rounds"] == list(range(1, ROUNDS + 1)), where
        # At most the round it died in is done again, and of that only what had not been accepted.
        done = case["round"] if case["point"] == "checkpoint_written" else case["round"] - 1
        assert case["resumed_from"] == done, where
        assert case["visits"] == DRAWN * (ROUNDS - done) - ACCEPTED[case["point"]], where
