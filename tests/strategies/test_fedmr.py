"""FedMR: every entry stays in the pool."""

import numpy as np
import pytest

from fedcross.strategies.fedmr import FedMR, groups, permutations
from fedcross.strategies.method import Round
from tests.support.pools import begun, draws, feed, model


def column(method, entry):
    """Return the pool's values of an entry by slot."""
    return [np.array(method.pool.model(slot)[entry]) for slot in range(len(method.pool))]


def test_the_rule_by_hand(monkeypatch):
    """w0 keeps its places, w1 moves one slot on, w2 two slots, the mean swaps 0 and 1, n moves one slot on."""
    orders = np.array([[0, 1, 2], [2, 0, 1], [1, 2, 0], [1, 0, 2], [2, 0, 1]])
    monkeypatch.setattr("fedcross.strategies.fedmr.permutations", lambda *_: orders)
    method = begun(FedMR, 3)
    feed(method, 1, {slot: model(float(slot), count=slot + 10) for slot in range(3)})
    assert [v[0] for v in column(method, "w0")] == [0, 1, 2]
    assert [v[0] for v in column(method, "w1")] == [102, 100, 101]
    assert [v[1] for v in column(method, "w2")] == [201, 202, 200]
    assert [v[0] for v in column(method, "mean")] == [1, 0, 2]
    assert [int(v) for v in column(method, "n")] == [12, 10, 11]


@pytest.mark.parametrize("partition", [0.0, 0.4, 1.0])
def test_every_entry_keeps_its_multiset_over_the_slots(partition):
    method, sent = begun(FedMR, 6, partition=partition), draws(6, 1)
    feed(method, 4, sent)
    for entry in method.start.arrays:
        before = sorted(upload[entry].tobytes() for upload in sent.values())
        assert sorted(value.tobytes() for value in column(method, entry)) == before
    mean = {entry: np.mean([upload[entry] for upload in sent.values()], 0, np.float64) for entry in method.start.arrays}
    for entry, array in method.global_model().items():
        np.testing.assert_allclose(array, np.trunc(mean[entry]) if entry == "n" else mean[entry], rtol=1e-6, atol=1e-7)


def test_entries_move_on_their_own_and_change_from_round_to_round():
    orders = permutations(6, 8, 0.0, Round(1, 0, (), 5))
    assert len({tuple(row) for row in orders}) == 6
    assert all(sorted(row) == list(range(8)) for row in orders)
    assert (orders != permutations(6, 8, 0.0, Round(2, 0, (), 5))).any()
    assert (orders != permutations(6, 8, 0.0, Round(1, 0, (), 6))).any()


def test_groups_by_hand():
    """Ten entries: a new group starts where the number reaches 10 p g, as in the authors' code."""
    assert groups(10, 0.0) == list(range(10))
    assert groups(10, 0.25) == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert groups(10, 0.5) == [0] * 5 + [1] * 5
    assert groups(10, 1.0) == [0] * 10
    orders = permutations(10, 5, 0.5, Round(1, 0, (), 0))
    assert (orders[:5] == orders[0]).all()
    assert (orders[5:] == orders[5]).all()


def test_the_first_stage_is_the_mean():
    method, sent = begun(FedMR, 4, first_stage=2), draws(4, 1)
    feed(method, 2, sent)
    assert (method.pool.rows == method.pool.rows[0]).all()
    np.testing.assert_allclose(method.pool.rows[0, :2], np.mean([u["w0"] for u in sent.values()], 0), atol=1e-6)
    feed(method, 3, sent)
    assert (method.pool.rows != method.pool.rows[0]).any()


def test_a_lost_slot_keeps_its_model_and_gives_nothing():
    method = begun(FedMR, 4)
    feed(method, 1, {slot: model(50.0) for slot in range(4)})
    feed(method, 2, draws(0, 2, slots=(0, 1, 3)))
    assert [float(v[0]) for v in column(method, "w0")].count(50.0) == 1
    assert method.pool.model(2)["w2"].tolist() == [250, 250]
    assert method.queue == [2, 0, 1, 3]


def test_whole_models_move_with_partition_1():
    method, sent = begun(FedMR, 5, partition=1.0), draws(5, 3)
    feed(method, 1, sent)
    models = [method.pool.model(slot) for slot in range(5)]
    found = [[s for s, u in sent.items() if all((u[e] == m[e]).all() for e in u)] for m in models]
    assert sorted(one for (one,) in found) == list(range(5))
