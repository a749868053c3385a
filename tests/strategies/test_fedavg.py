import numpy as np
import pytest

from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from tests.support.federation import run, same
from tests.support.game import Game


def upload(slot, value, examples, steps=0):
    arrays = {"w": np.array([value], np.float32), "steps": np.array(steps, np.int64)}
    return Upload(slot, slot, arrays, {}, examples, {})


def begun(**values):
    return Game(
        FedAvg, {"w": np.zeros(1, np.float32), "steps": np.array(0, np.int64)}, {"w"}, clients_per_round=2, **values
    )


def test_the_mean_is_weighted_by_examples():
    # (10 * 1 + 30 * 2) / 40 = 1.75; counters: (10 * 4 + 30 * 9) / 40 = 7.75, truncated to 7.
    method = begun()
    method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, 1.0, 10, 4), upload(1, 2.0, 30, 9)])
    assert method.global_model()["w"] == np.float32(1.75)
    assert method.global_model()["steps"] == 7
    assert method.global_model()["steps"].dtype == np.int64


def test_uniform_weighting_ignores_examples():
    method = begun(weighting="uniform")
    method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, 1.0, 10), upload(1, 2.0, 30)])
    assert method.global_model()["w"] == np.float32(1.5)


def test_one_upload_is_returned_to_the_bit():
    method = begun()
    method.aggregate(Round(1, 0, (0,), 0), [upload(0, 0.1, 7, 3)])
    assert method.global_model()["w"] == np.float32(0.1)
    assert method.global_model()["steps"] == 3


def test_a_round_without_uploads_changes_nothing():
    method = begun()
    before = method.global_model()["w"].copy()
    method.aggregate(Round(1, 0, (0, 1), 0), [])
    assert (method.global_model()["w"] == before).all()


def test_equal_integer_counters_stay_as_they_are():
    same_count = [{"n": np.array(10, np.int64)} for _ in range(3)]
    assert weighted_mean(same_count, [0.1, 0.3, 0.7])["n"] == 10


@pytest.mark.slow
def test_two_runs_of_one_seed_agree_and_two_seeds_differ(tmp_path):
    a = run(tmp_path / "a", "method=fedavg")
    b = run(tmp_path / "b", "method=fedavg")
    c = run(tmp_path / "c", "method=fedavg", "seed=2")
    assert same(a.driver.global_model(), b.driver.global_model())
    assert not same(a.driver.global_model(), c.driver.global_model())
