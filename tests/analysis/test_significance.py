"""Paired tests over seeds."""

import math
from pathlib import Path

import pytest

from fedcross.analysis.groups import group_runs
from fedcross.analysis.loading import load_runs
from fedcross.analysis.significance import compare, holm, interval, paired
from tests.support.fake import config, write_run


def test_paired_t_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 2 sqrt(3) with 2 degrees of freedom.
    # For 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    t, wilcoxon = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert t == pytest.approx(1 - math.sqrt(12 / 14))
    assert math.isnan(wilcoxon)


def test_wilcoxon_by_hand():
    # Six differences of one sign: 2 of the 2^6 sign patterns are as extreme.
    _, wilcoxon = paired([1.1, 2.2, 3.3, 4.4, 5.5, 6.6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert wilcoxon == pytest.approx(2 / 64)


@pytest.mark.parametrize("second", [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
def test_equal_differences_have_no_test(second: list[float]):
    assert all(math.isnan(p) for p in paired([1.0, 1.0, 1.0], second))


def test_two_pairs_have_an_interval_and_no_p():
    assert all(math.isnan(p) for p in paired([1.0, 2.0], [0.5, 1.4]))
    assert not any(math.isnan(end) for end in interval([1.0, 2.0], [0.5, 1.4]))


def test_interval_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3). t = 4.3026527 (2 degrees of freedom).
    assert interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2 - 4.3026527 / 3**0.5, 2 + 4.3026527 / 3**0.5))
    assert all(math.isnan(end) for end in interval([0.5], [0.25]))


def test_holm_by_hand():
    # Sorted .01 .03 .04 times 3, 2, 1: .03 .06 .04, made non-decreasing: .03 .06 .06. nan is no test.
    assert holm([0.04, 0.01, math.nan, 0.03]) == pytest.approx([0.06, 0.03, math.nan, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_seeds_are_paired_and_problems_are_kept_apart(tmp_path: Path):
    for seed, (a, b) in enumerate([(0.50, 0.55), (0.60, 0.68), (0.55, 0.57)], start=1):
        write_run(tmp_path / f"a{seed}", [a], config("fedavg", seed, 1))
        write_run(tmp_path / f"x{seed}", [b], config("fedcross", seed, 1))
    write_run(tmp_path / "a9", [0.9], config("fedavg", 9, 1))  # no partner
    write_run(tmp_path / "other", [0.9], config("fedcross", 1, 1, task__name="digits"))
    (found,) = compare(group_runs(load_runs([tmp_path]).runs)[0])
    assert (found.first, found.second, found.n) == ("fedcross", "fedavg", 3)
    assert found.difference == pytest.approx(0.05)
    # Differences .05 .08 .02: standard deviation .03, t = .05 / (.03 / sqrt 3) = 5 / sqrt 3, t^2 = 25 / 3.
    assert found.t == pytest.approx(1 - math.sqrt((25 / 3) / (25 / 3 + 2)))
    assert found.holm == found.t
    assert found.interval == pytest.approx((0.05 - 4.3026527 * 0.03 / 3**0.5, 0.05 + 4.3026527 * 0.03 / 3**0.5))


def test_many_configurations_are_compared_with_the_first_only(tmp_path: Path):
    for method in ("fedavg", "m1", "m2", "m3", "m4", "m5"):
        for seed in (1, 2):
            write_run(tmp_path / f"{method}{seed}", [0.1 * seed], config(method, seed, 1))
    found = compare(group_runs(load_runs([tmp_path]).runs)[0])
    assert [(c.first, c.second) for c in found] == [(f"m{i}", "fedavg") for i in range(1, 6)]


def test_many_configurations_are_compared_with_one_whose_clients_train_alike(tmp_path: Path):
    for momentum in (0.0, 0.9):
        for method in ("fedavg", "m1", "m2"):
            for seed in (1, 2):
                settings = config(method, seed, 1, train__momentum=momentum)
                write_run(tmp_path / f"{method}-{momentum}-{seed}", [0.1 * seed], settings)
    found = compare(group_runs(load_runs([tmp_path]).runs)[0])
    slow, fast = "fedavg train.momentum=0.0", "fedavg train.momentum=0.9"
    assert {(c.first, c.second) for c in found} == {
        (fast, slow),
        *((f"{method} train.momentum=0.0", slow) for method in ("m1", "m2")),
        *((f"{method} train.momentum=0.9", fast) for method in ("m1", "m2")),
    }
