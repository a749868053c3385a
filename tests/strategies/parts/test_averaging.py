"""Weighted means of models, by hand."""

import numpy as np
import pytest

from fedcross.strategies.parts.averaging import weighted_mean


def models(*values, dtype=np.float32):
    return [{"w": np.array([value, 2 * value], dtype), "n": np.array(int(value))} for value in values]


def test_by_hand():
    """(1 * 4 + 3 * 8) / 4 = 7, and twice that; the counters 4 and 8 come to 7 as well."""
    given = models(4, 8)
    mean = weighted_mean(given, [1, 3])
    assert (mean["w"].tolist(), mean["n"].tolist()) == ([7, 14], 7)
    assert (mean["w"].dtype, mean["n"].dtype) == (np.float32, np.int64)
    assert given[0]["w"].tolist() == [4, 8]  # the models stay as they are


def test_counters_are_truncated_towards_zero_but_not_by_rounding():
    """(2 + 3) / 2 = 2.5 is 2, and -2.5 is -2. Of six models with 7 each, 7/6 six times is 7 - 9e-16: it is 7."""
    assert weighted_mean(models(2, 3), [1, 1])["n"] == 2
    assert weighted_mean(models(-2, -3), [1, 1])["n"] == -2
    assert sum([7 * (1 / 6)] * 6) < 7
    assert weighted_mean(models(*[7] * 6), [1] * 6)["n"] == 7


def test_one_model_and_float64_stay_to_the_bit():
    given = models(0.1, dtype=np.float64)
    assert weighted_mean(given, [0.3])["w"].tobytes() == given[0]["w"].tobytes()


LARGE = [2**63 - 1, -(2**63), 2**62, 2**53 + 1, 7]


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 2, 4], [3, 0, 1e-9]])
def test_large_integers_that_all_models_share_stay(weights):
    """float64 has no 2**53 + 1, and a third of 2**63 three times is beyond int64."""
    for shape in ((5,), (5, 1)):
        given = [{"n": np.array(LARGE).reshape(shape), "s": np.array(2**53 + 1)} for _ in weights]
        mean = weighted_mean(given, weights)
        assert mean["n"].tolist() == given[0]["n"].tolist()
        assert (mean["s"], mean["s"].shape) == (2**53 + 1, ())
