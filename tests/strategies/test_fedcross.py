import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same
from tests.support.game import Game


def begun(k, d=1, **values):
    return Game(
        FedCross, {"w": np.zeros(d, np.float32), "n": np.array(0, np.int64)}, {"w"}, clients_per_round=k, **values
    )


def uploads(*models, slots=None, counts=None):
    return [
        Upload(slot, slot, {"w": np.asarray(m, np.float32), "n": np.array(c, np.int64)}, {}, 1, {})
        for m, slot, c in zip(models, slots or range(len(models)), counts or [0] * len(models))
    ]


def aggregate(method, number, ups):
    k = len(method.pool)
    return method.aggregate(Round(number, 0, tuple(range(k)), 0), ups)


def rows(method):
    return method.pool.rows.copy()


def test_in_order_by_hand():
    # K=3, alpha .75, round 1: r = 0, so co(i) = (i + 0 mod 2 + 1) mod 3 = 1, 2, 0.
    # w0 = .75*1 + .25*5 = 2; w1 = .75*5 + .25*9 = 6; w2 = .75*9 + .25*1 = 7. Mean 5, as before.
    method = begun(3, alpha=0.75, selection="in_order")
    aggregate(method, 1, uploads([1.0], [5.0], [9.0]))
    assert rows(method).ravel().tolist() == [2.0, 6.0, 7.0]
    assert method.global_model()["w"] == np.float32(5)


def test_in_order_second_round_by_hand():
    # Round 2: r = 1, offset 2: co = 2, 0, 1. w0 = .75*1 + .25*9 = 3; w1 = .75*5 + .25*1 = 4; w2 = .75*9 + .25*5 = 8.
    method = begun(3, alpha=0.75, selection="in_order")
    aggregate(method, 2, uploads([1.0], [5.0], [9.0]))
    assert rows(method).ravel().tolist() == [3.0, 4.0, 8.0]


def test_lowest_and_highest_similarity_by_hand():
    # a = (1,0), b = (1,1), c = (-1,0). cos(a,b) = .707, cos(a,c) = -1, cos(b,c) = -.707.
    # Lowest: a -> c, b -> c, c -> a. Highest: a -> b, b -> a, c -> b. alpha .5 gives the midpoints.
    models = ([1.0, 0.0], [1.0, 1.0], [-1.0, 0.0])
    low = begun(3, d=2, alpha=0.5, selection="lowest_similarity")
    aggregate(low, 1, uploads(*models))
    assert rows(low).tolist() == [[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
    high = begun(3, d=2, alpha=0.5, selection="highest_similarity")
    aggregate(high, 1, uploads(*models))
    assert rows(high).tolist() == [[1.0, 0.5], [1.0, 0.5], [0.0, 0.5]]


def test_one_model_is_the_identity():
    for selection in ("in_order", "lowest_similarity"):
        method = begun(1, alpha=0.6, selection=selection)
        aggregate(method, 3, uploads([7.0], counts=[5]))
        assert rows(method).tolist() == [[7.0]]
        assert method.global_model()["n"] == 5


def test_alpha_one_is_independent_training():
    method = begun(3, alpha=1.0, selection="lowest_similarity")
    aggregate(method, 1, uploads([1.0], [5.0], [9.0]))
    assert rows(method).ravel().tolist() == [1.0, 5.0, 9.0]


def test_a_lost_slot_keeps_its_model_and_mixes_with_nobody():
    # Slot 1 is lost: it stays 0. Valid slots 0 and 2 are each other's partner (m = 2): .75*1 + .25*9 = 3, 7.
    method = begun(3, alpha=0.75, selection="in_order")
    aggregate(method, 1, uploads([1.0], [9.0], slots=[0, 2]))
    assert rows(method).ravel().tolist() == [3.0, 0.0, 7.0]


def test_integer_counters_are_mixed_and_truncated():
    # in order, alpha .75: .75*1 + .25*2 = 1.25 -> 1; .75*2 + .25*1 = 1.75 -> 1.
    method = begun(2, alpha=0.75, selection="in_order")
    aggregate(method, 1, uploads([0.0], [0.0], counts=[1, 2]))
    assert method.pool.integers.ravel().tolist() == [1, 1]
    assert method.global_model()["n"].dtype == np.int64


@pytest.mark.slow
@given(
    st.integers(2, 7),
    st.integers(1, 50),
    st.floats(0.5, 1.0),
    st.integers(0, 2**31),
)
def test_in_order_keeps_the_mean(k, number, alpha, seed):
    models = np.random.default_rng(seed).normal(size=(k, 5)).astype(np.float32)
    method = begun(k, d=5, alpha=alpha, selection="in_order")
    aggregate(method, number, uploads(*models))
    before = models.astype(np.float64).mean(0)
    after = rows(method).astype(np.float64).mean(0)
    assert np.abs(after - before).max() <= 1e-6 * max(1.0, np.abs(models).max())


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_each_ordered_pair_meets_once_in_k_minus_1_rounds(k):
    met = set()
    for number in range(1, k):
        method = begun(k, d=k, alpha=0.5, selection="in_order")
        aggregate(method, number, uploads(*np.eye(k)))
        for i, row in enumerate(rows(method)):
            partner = int(np.flatnonzero((row > 0) & (np.arange(k) != i))[0])
            met.add((i, partner))
    assert met == {(i, j) for i in range(k) for j in range(k) if i != j}


def test_every_client_gets_its_own_row(tmp_path):
    method = begun(3, alpha=0.9)
    aggregate(method, 1, uploads([1.0], [2.0], [3.0]))
    sent = method.dispatch(Round(2, 0, (8, 4, 6), 0))
    assert [(p.client, p.slot) for p in sent] == [(8, 0), (4, 1), (6, 2)]
    assert [float(p.arrays["w"][0]) for p in sent] == rows(method).ravel().tolist()


def test_alpha_one_k_clients_differs_from_fedavg_but_one_client_is_the_same(tmp_path):
    one = ("clients_per_round=1", "rounds=2")
    fedavg = run(tmp_path / "a", "method=fedavg", *one)
    fedcross = run(tmp_path / "b", "method=fedcross", *one)
    assert same(fedavg.driver.global_model(), fedcross.driver.global_model())


def test_a_ramp_of_one_round_begins_at_its_end():
    ramp = {"schedule": "linear", "start": 3, "end": 4, "rounds": 1}
    method = Game(FedCross, {"w": np.zeros(2, np.float32)}, clients_per_round=3, k=ramp)
    assert len(method.pool) == 4
