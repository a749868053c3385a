"""Propellers: who weighs what, how much that mixes, when they stop; independent starts; how often models are chosen."""

import numpy as np
import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedcross import FedCrossParams
from fedcross.strategies.pool.mixing import chosen, cross, offsets, propellers
from tests.strategies.test_fedcross_options import aggregate, begun, mixed, uploads
from tests.support.federation import session


def factor(mixing):
    """Return by what a mixing multiplies the variance of independent models around their mean: |C W|^2 / (K - 1)."""
    return float(((mixing - mixing.mean(axis=0)) ** 2).sum() / (len(mixing) - 1))


def factors(k=10, alpha=0.99, count=2):
    distances = offsets(k, count, 1)
    found = {
        weighting: factor(
            propellers(
                k, range(k), distances, {"equal": None, "alpha": alpha, "each": 1 - count * (1 - alpha)}[weighting]
            )
        )
        for weighting in ("alpha", "each", "equal")
    }
    return found | {"plain": factor(cross(k, range(k), (np.arange(k) + 1) % k, alpha))}


def test_the_default_weighting_is_the_one_that_mixes_most():
    # By hand, sum of squares s of a row: 1 - (1 - s) 10/9. Plain .99^2 + .01^2 = .9802; alpha .99^2 + 2 .005^2 =
    # .98015; each .98^2 + 2 .01^2 = .9606; equal 1/3.
    found = factors()
    assert found == pytest.approx({"plain": 0.978, "alpha": 0.9779444, "each": 0.9562222, "equal": 0.2592593})
    assert min(found, key=found.__getitem__) == FedCrossParams().propeller_weighting


def test_each_propeller_gets_a_collaborators_share_by_hand():
    # K=4, P=2, round 1: offsets 1 and 2. alpha .75: w_i = .5 v_i + .25 v_(i+1) + .25 v_(i+2), v = 0, 4, 8, 16.
    method = begun(4, mode="propellers", propeller_weighting="each", alpha=0.75)
    assert mixed(method, 1, 0, 4, 8, 16) == [3, 8, 8, 9]


def test_each_with_fewer_models_has_fewer_propellers():
    # Two models: one propeller, which gets 1 - alpha, as in plain FedCross.
    method = begun(2, mode="propellers", propeller_weighting="each", alpha=0.75)
    assert mixed(method, 1, 0, 4) == [1, 3]


def test_each_must_leave_the_own_model_something():
    with pytest.raises(ConfigError, match=r"1 - 2 \(1 - alpha\) = 0 in round 1"):
        load(("method=fedcross", "method.mode=propellers", "method.propeller_weighting=each", "method.alpha=0.5"))
    # Dynamic alpha begins at .5 but after the propellers' stage; the other way round it is a fault.
    assert load(("method=fedcross_pm_da", "method.propeller_weighting=each"))
    ramp = "method.alpha={schedule: linear, start: 0.5, end: 0.99, rounds: 100}"
    with pytest.raises(ConfigError, match="in round 1"):
        load(("method=fedcross_propellers", "method.propeller_weighting=each", ramp))


@pytest.mark.slow
def test_propellers_stop_after_a_hundred_rounds_and_dynamic_alpha_is_at_its_end():
    method = load(("method=fedcross_propellers",)).method
    assert [method.at("mode", r) for r in (1, 100, 101, 2000)] == ["propellers", "propellers", "cross", "cross"]
    method = load(("method=fedcross_dynamic_alpha",)).method
    assert [method.at("alpha", r) for r in (1, 100, 101)] == [0.5, 0.99, 0.99]
    assert method.at("alpha", 99) < 0.99


# ---- how often each model is chosen -------------------------------------------------------------------------------


def test_how_often_each_model_is_chosen():
    # On a line at 0, 1 and 10: the farthest from 0 and from 1 is 10 (slot 2), from 10 it is 0 (slot 0).
    found = aggregate(begun(3, alpha=0.9, similarity="euclidean"), 1, uploads([0], [1], [10]))
    assert found["chosen_most"] == 2
    assert [found[f"chosen_{slot}"] for slot in range(3)] == [1, 0, 2]
    assert found["chosen_models"] == 2


def test_a_permutation_chooses_everyone_once_and_propellers_p_times():
    found = aggregate(begun(4, selection="in_order", alpha=0.9), 1, uploads([1], [2], [3], [4]))
    assert [found[f"chosen_{slot}"] for slot in range(4)] == [1, 1, 1, 1]
    found = aggregate(begun(4, mode="propellers"), 1, uploads([1], [2], [3], [4]))
    assert [found[f"chosen_{slot}"] for slot in range(4)] == [2, 2, 2, 2]


def test_lost_slots_are_not_chosen_and_large_pools_only_summed_up():
    found = aggregate(begun(3, selection="in_order", alpha=0.9), 1, uploads([1], [2], slots=[0, 2]))
    assert [found[f"chosen_{slot}"] for slot in range(3)] == [1, 0, 1]
    partners = [1] + [0] * 24
    assert chosen(cross(25, range(25), partners, 0.9), list(range(25))) == {"chosen_most": 24, "chosen_models": 2}
    assert chosen(cross(2, [], [], 0.9), []) == {}


# ---- independent starts --------------------------------------------------------------------------------------------


def test_independent_models_are_keyed_by_seed_and_slot(tmp_path):
    def rows(name, *more):
        return session(
            tmp_path / name, "method=fedcross", "method.independent_start=true", *more
        ).driver.state.pool.rows

    three, again, other, four = rows("a"), rows("b"), rows("c", "seed=2"), rows("d", "clients_per_round=4")
    assert len({row.tobytes() for row in three}) == 3
    assert (three == again).all()
    assert not (three == other).any(axis=1).all()
    assert (four[:3] == three).all()
    scales = three.std(axis=1)  # all are drawn from the same law
    assert scales.max() < 1.2 * scales.min()
