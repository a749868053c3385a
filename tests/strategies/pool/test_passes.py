"""The passes give the same bits whatever the size of the blocks and the number of threads."""

import numpy as np
import pytest
import torch

from fedcross.strategies.pool import blocks, kernels
from fedcross.strategies.pool.layout import Layout
from fedcross.strategies.pool.passes import approach, follow, mutate, pull, recombine, squared_distance
from fedcross.strategies.pool.pool import Pool

SHAPES = {"a": (700,), "b": (), "c": (3, 211), "empty": (0,), "statistic": (300,)}


def filled(k=5):
    """A pool whose parameters `a` and `c` come first, with a counter between the entries."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    arrays = {"a": arrays["a"], "n": np.array([1, 2]), **arrays}
    pool = Pool(Layout.of(arrays, {"a", "c"}), k)
    generator = np.random.default_rng(2)
    pool.rows[...] = generator.normal(size=pool.rows.shape)
    pool.integers[...] = generator.integers(0, 99, pool.integers.shape)
    return pool


def recombined(pool):
    orders = np.random.default_rng(1).permuted(np.tile(np.arange(3), (len(pool.layout.entries), 1)), axis=1)
    recombine(pool, [0, 2, 3], orders)


def mutated(pool):
    factors = np.random.default_rng(1).normal(size=(len(pool.layout.entries), len(pool)))
    mean = pool.rows[1].copy()
    return mean, mutate(pool, [0, 2, 3], mean, factors)


def followed(own):
    return lambda pool: follow(pool, own, pool.rows[1].copy(), pool.rows[2].copy(), 0.5)


PASSES = {
    "recombine": recombined,
    "mutate": mutated,
    "pull": lambda pool: pull(pool, range(5), 0.9),
    "pull some": lambda pool: pull(pool, [0, 1, 4], 0.3),
    "follow": followed(0.9),
    "follow far": followed(0.2),
}


@pytest.mark.parametrize("make", PASSES.values(), ids=PASSES)
def test_blocks_and_threads_change_no_bit(make, monkeypatch):
    whole = filled()
    make(whole)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # blocks of 256 columns
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        cut = filled()
        make(cut)
    finally:
        torch.set_num_threads(threads)
    assert (cut.rows == whole.rows).all()
    assert (cut.integers == whole.integers).all()
    assert (whole.rows != filled().rows).any()


def test_recombination_moves_every_entry_as_told():
    pool, before = filled(), filled()
    recombined(pool)
    orders = np.random.default_rng(1).permuted(np.tile(np.arange(3), (len(pool.layout.entries), 1)), axis=1)
    members = np.array([0, 2, 3])
    for entry, order in zip(pool.layout.entries, orders, strict=True):
        for slot, source in zip(members, members[order], strict=True):
            assert (pool.model(slot)[entry.name] == before.model(source)[entry.name]).all()
    for slot in (1, 4):
        assert (pool.rows[slot] == before.rows[slot]).all()
        assert (pool.integers[slot] == before.integers[slot]).all()


def test_mutation_by_formula():
    pool, before = filled(), filled()
    mean, integers = mutated(pool)
    factors = np.random.default_rng(1).normal(size=(len(pool.layout.entries), 5))
    expected = before.mean(members=[0, 2, 3])
    old, found = before.model(1), pool.layout.views(mean, integers)
    for which, entry in enumerate(pool.layout.entries):
        np.testing.assert_allclose(found[entry.name], expected[entry.name], atol=1e-6)
        for slot in range(5):
            made = expected[entry.name]
            if not entry.is_integer:
                made = made + factors[which, slot] * (made - old[entry.name])
            np.testing.assert_allclose(pool.model(slot)[entry.name], made, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", PASSES.values(), ids=PASSES)
def test_the_compiled_loops_agree_with_the_plain_ones(make, monkeypatch):
    """Recombination to the bit, the others within rounding; and whatever the blocks are."""
    plain = filled()
    make(plain)
    monkeypatch.setattr(blocks, "KERNEL_BYTES", 0)
    compiled = filled()
    make(compiled)
    np.testing.assert_allclose(compiled.rows, plain.rows, rtol=0, atol=0 if make is recombined else 2e-6)
    assert (compiled.integers == plain.integers).all()
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    cut = filled()
    make(cut)
    assert (cut.rows == compiled.rows).all()


@pytest.mark.parametrize(("limit", "compiled"), [(0, True), (1, False)])
def test_pools_of_just_that_many_bytes_use_the_compiled_loops(limit, compiled, monkeypatch):
    used = set()
    pool = filled()
    monkeypatch.setattr(blocks, "KERNEL_BYTES", pool.rows.nbytes + limit)
    for name in ("move", "pull", "mutate", "follow"):
        monkeypatch.setattr(kernels, name, lambda *given, name=name: used.add(name))
    recombined(pool)
    pull(pool, [0, 1], 0.5)
    mutated(pool)
    followed(0.5)(pool)
    assert used == ({"move", "pull", "mutate", "follow"} if compiled else set())


def test_who_is_not_pulled_stays_even_beside_a_model_that_is_not_finite():
    """A lone member has nobody to be pulled to, and all of one's own is no pull."""
    pool = filled()
    pool.rows[0], pool.rows[1, 7] = np.nan, np.inf
    before = pool.rows.copy()
    pull(pool, [1], 0.5)
    pull(pool, [0, 1, 2], 1.0)
    np.testing.assert_array_equal(pool.rows, before)


def test_two_members_are_pulled_by_hand():
    """Mean 6 of 4 and 8, own .25: 5.5 and 6.5. Of 10 and 14: 11.5 and 12.5, of 20 and 30: 23.75 and 26.25, cut."""
    pool = Pool(Layout.of({"w": np.zeros(1, np.float32), "n": np.zeros(2, np.int64)}, {"w"}), 3)
    pool.rows[:, 0], pool.integers[...] = [4, 100, 8], [[10, 20], [1, 1], [14, 30]]
    pull(pool, [0, 2], 0.25)
    assert pool.rows[:, 0].tolist() == [5.5, 100, 6.5]
    assert pool.integers.tolist() == [[11, 23], [1, 1], [12, 26]]


@pytest.mark.parametrize("own", [0.9, 0.2])
def test_following_by_formula(own):
    pool, before = filled(), filled()
    followed(own)(pool)
    expected = own * before.rows + (1 - own) * before.rows[1] + 0.5 * before.rows[2]
    np.testing.assert_allclose(pool.rows, expected, rtol=0, atol=2e-6)
    pull(before, range(5), own)
    assert (pool.integers == before.integers).all()


@pytest.mark.parametrize("size", [1, 5000])
def test_an_average_approaches_a_mean_to_the_bit(size, monkeypatch):
    """Each operation rounds to float32, in whatever pieces."""
    draw = np.random.default_rng(4)
    average, mean = draw.normal(size=(2, size)).astype(np.float32)
    expected = average + (mean - average) * np.float32(0.3)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    approach(average, mean, 0.3)
    assert (average == expected).all()


def test_an_entry_after_many_counters_moves():
    """Counters have numbers among the entries, but no columns."""
    arrays = {**{f"n{i}": np.array(0) for i in range(3)}, "w": np.zeros(1, np.float32)}
    pool = Pool(Layout.of(arrays, {"w"}), 2)
    pool.rows[:, 0], pool.integers[:, 1] = [5, 7], [1, 2]
    recombine(pool, [0, 1], np.array([[0, 1], [1, 0], [0, 1], [1, 0]]))
    assert pool.rows[:, 0].tolist() == [7, 5]
    assert pool.integers.tolist() == [[0, 2, 0], [0, 1, 0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 700, 600_001])
def test_the_squared_distance_is_that_of_float64(size, dtype):
    generator = np.random.default_rng(size)
    one, other = (generator.normal(size=size).astype(dtype) for _ in range(2))
    one.flags.writeable = False  # as an upload's arrays are
    expected = float(((one.astype(np.float64) - other) ** 2).sum())
    assert squared_distance(one, other) == pytest.approx(expected, rel=1e-5)


def test_the_squared_distance_does_not_depend_on_the_threads():
    one, other = np.random.default_rng(3).normal(size=(2, 900_000)).astype(np.float32)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(squared_distance(one, other))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
