"""The defence over several rounds, in virtual time."""

import math

import numpy as np
import pytest

from fedcross.strategies.defence.defender import Defender
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.wire.protocol import Upload
from fedcross.tasks.models.slicing.plan import FULL
from tests.strategies.defence.test_bands import BANDS, NAMES, NARROW, upload
from tests.support.virtual import Clock, VirtualGrid, answers, fails

ON = Defence(enabled=True)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def federation(clock, **rules):
    """Return FedAvg with three slots, six clients and three weights, and its grid."""
    given = {"clients_per_round": 3, "nonce": True, "deadline_s": 100, "run": "r", "defence": ON, **rules}
    method = FedAvg(**given)
    method.begin({"w": np.zeros(3, np.float32)})
    return method, VirtualGrid(clock, 6, {})


def play(clock, method, number, *values):
    """Run a round in which the drawn clients change each weight by these values, in their order; None fails."""
    scripts = [fails(1) if value is None else answers(1, value=value) for value in values]
    before = method.global_model()["w"].copy()
    report = method.run_round(number, VirtualGrid(clock, 6, dict(zip(method.sample(number, range(6)), scripts))))
    return float((method.global_model()["w"] - before).mean()), report.rejected


@pytest.mark.parametrize(("on", "lost", "few"), [(True, 2, 1), (True, 1, 0), (False, 2, 0)])
def test_the_defence_takes_no_lone_reply_in_a_first_round(clock, on, lost, few):
    """There is nothing to compare it with, so one hostile device could undo the run in such a round."""
    method, _ = federation(clock, defence=Defence(enabled=on))
    moved, rejected = play(clock, method, 1, *[None] * lost, *[1.0] * (3 - lost))
    assert (moved, rejected["too_few"]) == (pytest.approx(0 if few else 1), few)


@pytest.mark.parametrize(("value", "moved"), [(2.0, 1.25), (8.0, 2.0), (10.0, 1.0), (1e18, 1.0)])
def test_of_two_first_replies_neither_makes_the_other_usual(clock, value, moved):
    """Beside 1: 2 becomes the mean, 1.5; 8 three times the smaller one, 3; more than nine times it is lost."""
    method, _ = federation(clock)
    assert play(clock, method, 1, None, 1.0, value) == (
        pytest.approx(moved),
        {"client_error": 1} | ({"quarantined": 1} if value > 9 else {}),
    )
    assert method.defender.usual == {}


@pytest.mark.parametrize("rounds", [1, 5])
def test_two_honest_clients_go_on_for_ever_without_the_third(clock, rounds):
    """One changes four times as much as the other, and a third device never answers."""
    method, _ = federation(clock)
    for number in range(1, rounds + 1):
        assert play(clock, method, number, 1.0, 4.0, None)[1] == {"client_error": 1}


def test_a_lone_reply_is_compared_with_what_was_usual_before(clock):
    """Updates of 1 in each of three values are usual: 9 is too much (3 times), 2 is shortened; after a resume too."""
    for value, moved in ((9.0, 0.0), (2.0, 1.0)):
        method, _ = federation(clock)
        play(clock, method, 1, 1.0, 1.0, 1.0)
        resumed, _ = federation(clock)
        resumed.resume(method.checkpoint())
        for one in (method, resumed):
            change, rejected = play(clock, one, 2, value, None, None)
            assert change == pytest.approx(moved)
            assert rejected.get("quarantined", 0) == (moved == 0)


def test_an_idle_and_a_tiny_reply_only_slow_a_federation_that_has_worked(clock):
    """1 is shortened to the mean of two, and the tiny one makes nothing usual."""
    method, _ = federation(clock)
    play(clock, method, 1, 1.0, 1.0, 1.0)
    for number in (2, 3):
        change, rejected = play(clock, method, number, 0.0, 1e-6, 1.0)
        assert (change, rejected) == (pytest.approx(0.5 / 3, rel=1e-4), {})


@pytest.mark.parametrize(("values", "quarantined"), [((1.0, 1.0), 0), ((1.0, -1e6), 1), ((0.0, 1.0), 0)])
def test_a_federation_that_asks_two_is_judged_by_those(clock, values, quarantined):
    method, _ = federation(clock, clients_per_round=2)
    for number in (1, 2):
        assert play(clock, method, number, *values)[1].get("quarantined", 0) == quarantined


def test_a_checkpoint_of_an_earlier_version_has_one_length_for_all_exchanges(clock):
    method, _ = federation(clock)
    play(clock, method, 1, 1.0, 1.0, 1.0)
    state = method.checkpoint()
    assert state.values["_usual"] == {"0": [pytest.approx(math.sqrt(3))]}
    state.values["_usual"] = 2.0
    resumed, _ = federation(clock)
    resumed.exchanges = 2
    resumed.resume(state)
    assert resumed.defender.usual == {0: [2.0], 1: [2.0]}


@pytest.mark.parametrize("false", [-1e6, -10.0, 1e-3])
def test_one_round_with_a_hostile_majority_decides_nothing(clock, false):
    """Two of the three that a round draws are hostile: long updates are lost, and short ones slow that round only."""
    method, _ = federation(clock)
    for number in (1, 2, 3):
        play(clock, method, number, 1.0, 1.0, 1.0)
    change, rejected = play(clock, method, 4, false, 1.0, false)
    if false < 0:
        assert (change, rejected) == (pytest.approx(1), {"quarantined": 2})
    else:
        assert (change, rejected) == (pytest.approx(1e-3, rel=1e-3), {"quarantined": 1})
    resumed, _ = federation(clock)
    resumed.resume(method.checkpoint())
    for one in (method, resumed):
        assert play(clock, one, 5, 1.0, 1.0, 1.0) == (pytest.approx(1), {})


def test_updates_that_truly_grow_are_usual_after_three_rounds(clock):
    """A hundredfold, from one round to the next: more than three times three is lost meanwhile."""
    method, _ = federation(clock)
    for number in range(1, 6):
        play(clock, method, number, 1.0, 1.0, 1.0)
    lost = [play(clock, method, number, 100.0, 100.0, 100.0)[1].get("quarantined", 0) for number in range(6, 10)]
    assert lost == [3, 3, 3, 0]


def judge_slices(*slices):
    """Return what one exchange with these slices becomes, and the defender."""
    defender = Defender(ON, 1.0, len(slices))
    ups = [Upload(i, i, arrays, {}, 1, {}) for i, (arrays, _) in enumerate(slices)]
    return defender.judge(0, ups, [model for _, model in slices], NAMES, [], BANDS), defender


def test_in_what_only_wide_models_have_a_false_update_is_no_longer_than_shortened_honest_ones():
    """M is 18.31. Two honest wide ones of (30, 0, 10) become that long, so 10 of each becomes 10 * 18.31 / 31.62."""
    honest = [upload(FULL, 30, 0, 10)] * 2
    verdict, _ = judge_slices(*honest, upload(FULL, 0, 0, -1e3), *[upload(NARROW, 5)] * 3)
    assert [float(u.arrays["in"][2, 0]) for u in verdict.uploads[:3]] == pytest.approx(
        [5.7906, 5.7906, -5.7906], rel=1e-4
    )
    assert (verdict.clipped, verdict.quarantined) == (3, [])


def test_a_narrow_slice_is_not_taken_for_longer_than_it_is():
    """All are 5 long, and the narrow ones have 5 values of 11: as long as if they had all it would be 7.4."""
    verdict, _ = judge_slices(*[upload(FULL, 5)] * 3, upload(NARROW, 5), upload(NARROW, 5))
    assert (verdict.clipped, verdict.quarantined) == (0, [])


def test_a_slice_a_million_times_too_long_is_lost():
    verdict, _ = judge_slices(*[upload(FULL, 1, 1, 1)] * 3, upload(NARROW, 1e7))
    assert [u.client for u, *_ in verdict.quarantined] == [3]


def test_a_checkpoint_keeps_what_is_usual_in_a_band():
    _, defender = judge_slices(*[upload(FULL, 1, 1, 2)] * 3, upload(NARROW, 1))
    assert {band: lengths[0] for band, lengths in defender.bands[0].items()} == pytest.approx(
        {7: 1, 3: 1, 1: 2}, rel=0.2
    )
    other = Defender(ON, 1.0, 4)
    other.restore(defender.state(), 1)
    assert (other.bands, other.usual) == (defender.bands, defender.usual)
