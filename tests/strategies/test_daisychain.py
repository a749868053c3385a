"""Daisy chaining: permutations between rare averages."""

from fedcross.strategies.daisychain import DaisyChain
from tests.support.pools import begun, feed, model

FIVE = {slot: model(float(slot), count=slot) for slot in range(5)}


def test_models_move_whole_and_are_averaged_in_every_fourth_round():
    """d = 2, b = 4: rounds 1 and 3 change nothing, 2 and 6 permute, 4 averages."""
    seen = {}
    for number in range(1, 7):
        method = begun(DaisyChain, 5, daisy=2, average=4)
        feed(method, number, FIVE)
        seen[number] = method.pool.rows[:, 0].tolist()
        assert method.pool.rows[:, 6].tolist() == seen[number]
        assert method.global_model()["w0"].tolist() == [2, 2]
        if number != 4:
            assert method.pool.integers.ravel().tolist() == seen[number]
    assert seen[1] == seen[3] == seen[5] == [0, 1, 2, 3, 4]
    assert seen[4] == [2] * 5
    assert sorted(seen[2]) == sorted(seen[6]) == [0, 1, 2, 3, 4]
    assert seen[2] != seen[6]


def test_a_lost_slot_neither_moves_nor_is_averaged():
    method = begun(DaisyChain, 5, average=2)
    feed(method, 1, {slot: upload for slot, upload in FIVE.items() if slot != 3})
    assert method.pool.rows[3, 0] == 0  # the initial model
    assert sorted(method.pool.rows[[0, 1, 2, 4], 0]) == [0, 1, 2, 4]
    feed(method, 2, {0: model(6.0), 1: model(8.0)})
    assert method.pool.rows[:2, 0].tolist() == [7, 7]
    assert method.pool.rows[3, 0] == 0


def test_with_all_clients_a_slot_belongs_to_a_client():
    method = begun(DaisyChain, 4)
    assert method.sample(1, [7, 2, 9, 4]) == method.sample(2, [2, 4, 7, 9]) == (2, 4, 7, 9)
