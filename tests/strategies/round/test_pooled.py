"""What every method with one model per slot shares."""

import numpy as np

from fedcross.strategies.masterpull import MasterPull
from fedcross.strategies.wire.protocol import Round
from tests.support.federation import run
from tests.support.pools import begun, draws, feed


def test_slot_i_goes_to_the_ith_client_and_the_longest_waiting_go_first():
    method = begun(MasterPull, 4)
    feed(method, 1, draws(0, 1, slots=(0, 1, 3)))
    sent = method.dispatch(Round(2, 0, (8, 4, 6, 5), 0))
    assert [(p.client, p.slot) for p in sent] == [(8, 0), (4, 1), (6, 2), (5, 3)]
    for payload in sent:
        assert (payload.arrays["w1"] == method.pool.model(payload.slot)["w1"]).all()
    few = method.dispatch(Round(2, 0, (9, 1), 0))
    assert [(p.client, p.slot) for p in few] == [(9, 0), (1, 2)]
    assert method.stalest([0, 1, 2]) == [2, 0, 1]


def test_the_pool_is_measured_where_that_is_due():
    every = begun(MasterPull, 3, diagnostics_every=2, alpha=0.0)
    assert feed(every, 1, draws(3, 1)) == {}
    metrics = feed(every, 2, draws(3, 2))
    assert metrics["pool_similarity_mean"] == 1
    assert metrics["pool_spread"] < 1e-3
    assert feed(begun(MasterPull, 3, diagnostics_every=0), 2, draws(3, 2)) == {}


def test_a_run_counts_one_model_each_way(tmp_path):
    report = run(tmp_path, "method=masterpull", "rounds=1").method._report
    assert (report.bytes_down, report.bytes_up) == (3 * 4 * 4810, 3 * 4 * 4810)
    assert np.isfinite(report.metrics["pool_spread"])
