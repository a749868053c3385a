"""GitFL by hand: master, control of the branches, choice of clients."""

import numpy as np
import pytest

from fedcross.core.errors import ConfigError
from fedcross.strategies.gitfl import GitFL
from fedcross.strategies.masterpull import MasterPull
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same
from tests.support.game import Game
from tests.support.pools import begun, feed, model


def started(k=2, **values):
    return Game(
        GitFL,
        {"w": np.zeros(1, np.float32), "n": np.array(0, np.int64)},
        {"w"},
        clients_per_round=k,
        rounds=10,
        **values,
    )


def arrive(method, **values):
    sent = [Upload(0, int(name[1:]), {"w": np.float32([w]), "n": np.array(int(w), np.int64)}, {}, 1, {})
            for name, w in values.items()]  # fmt: skip
    return method.aggregate(Round(1, 0, (), 0), sent)


def test_branches_by_hand():
    """Slot 0: 6, n = (1, 0), M = 6. Slot 1: 12, n = (1, 1), M = 9, c = 10: (120 + 9)/11. Slot 1 again: 24, n = (1, 2),
    M = (6 + 48)/3 = 18, c = 10.5: (252 + 18)/11.5. The counters: 24 and 6 give M = 18, (10.5 24 + 18)/11.5 = 23.48.
    """
    method = started()
    arrive(method, s0=6.0)
    assert method.pool.rows[:, 0] == pytest.approx([6, 0])
    assert method.global_model()["w"] == 6
    arrive(method, s1=12.0)
    assert method.pool.rows[:, 0] == pytest.approx([6, 129 / 11])
    assert method.global_model()["w"] == 9
    arrive(method, s1=24.0)
    assert method.pool.rows[:, 0] == pytest.approx([6, 270 / 11.5])
    assert method.global_model()["w"] == 18
    assert method.pool.integers.ravel().tolist() == [6, 23]


def test_control_is_clipped():
    """n = (9, 1): mean 5, c = 10 - 4 = 6 for slot 1, clipped to 7 with least=7; M = (9 * 0 + 8)/10 = .8: 56.8/8."""
    method = started(least=7.0)
    method.versions = [9, 0]
    arrive(method, s1=8.0)
    assert method.pool.rows[1, 0] == pytest.approx(56.8 / 8)


def test_equal_versions_are_master_pull():
    ours, theirs = begun(GitFL, 4), begun(MasterPull, 4)
    for number in (1, 2, 3):
        sent = {slot: model(float(slot * number), count=slot) for slot in range(4)}
        feed(ours, number, sent)
        feed(theirs, number, sent)
    np.testing.assert_allclose(ours.pool.rows, theirs.pool.rows, rtol=0, atol=1e-4)
    for name, array in theirs.global_model().items():
        np.testing.assert_allclose(ours.global_model()[name], array, rtol=1e-6, atol=1e-5)


def weight(method, slot, client, there=range(6)):
    return method.weight(method.state, method.round(1, budgets=dict.fromkeys(there, 1.0)), slot, client)


def timed(method, client, *seconds):
    """Let visits of this length end; None is a lost one."""
    for took in seconds:
        arrays = {"w": np.zeros(1, np.float32), "n": np.array(0)}
        sent = [] if took is None else [Upload(client, 0, arrays, {}, 1, {}, seconds=took)]
        method.aggregate(method.round(1, (client,)), sent)


def test_weights_of_clients_by_hand():
    """Visits 3 and 0: curiosity .5 and 1. Half of 20 visits gone: a = .25; T = (6, 0, 0, 0, 0, 0), mean 1; slot 0 is 1
    ahead: speed of client 0 = 5/60, of client 1 = -1/60; of a slot that is 1 behind: the opposite.
    """
    method = started(curious=0.2)
    timed(method, 0, 4.0, 6.0, 8.0)
    assert method.durations == {0: pytest.approx(6.0)}
    assert (weight(method, 0, 0), weight(method, 0, 1)) == (0.5, 1.0)
    method.ended[5], method.state.versions = 7, [3, 1]
    assert weight(method, 0, 0) == pytest.approx(0.25 * 0.5 + 0.75 * 5 / 60)
    assert weight(method, 0, 1) == pytest.approx(0.25 - 0.75 / 60)
    assert weight(method, 1, 0) == pytest.approx(0.25 * 0.5 - 0.75 * 5 / 60)


def test_when_all_who_have_trained_are_gone_curiosity_alone_decides():
    """No T is known of those that are here: speed is 0. Half of the run is gone: a = .25, and nobody was visited."""
    method = started()
    timed(method, 0, 3.0)
    method.ended[1], method.state.versions = 9, [3, 1]
    assert [weight(method, 0, client, there=(5, 6, 7)) for client in (5, 6, 7)] == [0.25] * 3


def test_curiosity_chooses_whom_nobody_has_visited():
    method = started()
    method.ended.update(dict.fromkeys(range(5), 10**8))
    method.state.ended[5] = 0
    method.method.params = method.params.model_copy(update={"curious": 1.0})
    drawn = [
        method.method.sample(method.state, method.round(1, exchange=group, slots=(0, 1)), [0, 2, 5])
        for group in range(20)
    ]
    assert all(5 in pair and len(set(pair)) == 2 for pair in drawn)


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    settings = ("method=gitfl", "devices=uniform", "method.curious=0.2")
    one = run(tmp_path / "a", *settings, "rounds=4").driver
    run(tmp_path / "b", *settings, "rounds=4", "checkpoint.every=1", "checkpoint.keep=9")
    for late in (3, 4):
        (tmp_path / "b" / "checkpoints" / f"round-{late:06d}.safetensors").unlink()
    two = run(tmp_path / "b", *settings, "rounds=4", f"resume={tmp_path / 'b'}").driver
    assert same(one.global_model(), two.global_model())
    assert one.checkpoint().values == two.checkpoint().values


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ConfigError, match=r"least=60 is above most=50"):
        GitFL(least=60.0)


def test_a_lost_visit_does_not_count_in_the_mean_duration():
    """Visits of 4 and 8 seconds and a lost one between them: 6 seconds on average, three ended visits."""
    method = started()
    timed(method, 0, 4.0, None, 8.0)
    assert method.durations == {0: 6.0}
    assert (method.ended, method.visits) == ({0: 3}, {0: 2})


def test_late_in_a_run_curiosity_and_speed_count_half_each_and_no_more():
    """Sixty visits where twenty were planned; T = (6, 0, 0, 0, 0, 0), slot 0 is 1 ahead: a speed of 5/60."""
    method = started()
    timed(method, 0, 6.0)
    method.ended[1], method.state.versions = 59, [3, 1]
    assert weight(method, 0, 0) == pytest.approx(0.5 / 2**0.5 + 0.5 * 5 / 60)


def test_the_spread_of_versions_is_told_at_the_end_of_a_round():
    method = started()
    for value in (6.0, 12.0, 24.0):
        metrics = arrive(method, s1=value)
    assert metrics["version_spread"] == 3
    assert arrive(method, s0=3.0)["version_spread"] == 2
    assert method.aggregate(method.round(1, last=False), []) == {}
