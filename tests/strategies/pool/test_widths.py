"""A pool of models of several widths: rows, bands, similarity on the shared corner, mixing and means by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedcross.core.errors import ConfigError
from fedcross.strategies.pool.mixing import FROM_GRAM, among, cross, similarity, uniform
from fedcross.strategies.pool.pool import Layout, Pool
from fedcross.tasks.models.width import FULL, Corners, Width, kept


def shapes(width):
    """Three hidden units: widths 1, .66 (2 units) and .3 (1 unit); two inputs, one class, batch statistics."""
    hidden = kept(3, width.ratio)
    return {"in": (hidden, 2), "mean": (hidden,), "n": (), "out": (1, hidden), "bias": (1,)}


PLAN = Corners(shapes, (3,))
WIDE, MIDDLE, NARROW = FULL, Width(0.66), Width(0.3)


def full(start=0.0, count=0):
    """A full model whose values are start, start + 1, ...; the bias is 100 more."""
    return {
        "in": np.arange(6, dtype=np.float32).reshape(3, 2) + start,
        "mean": np.arange(3, dtype=np.float32) + start,
        "n": np.array(count, np.int64),
        "out": np.arange(3, dtype=np.float32).reshape(1, 3) + 10 + start,
        "bias": np.full(1, 100 + start, np.float32),
    }


def pool_of(*sizes, plan=PLAN):
    pool = Pool(Layout.of(full(), {"in", "out", "bias"}), len(sizes), widths=sizes, corners=plan)
    pool.fill(full())
    return pool


def write(pool, *starts, counts=(0, 0, 0, 0)):
    for slot, (start, count) in enumerate(zip(starts, counts)):
        pool.write(slot, PLAN.corner(full(start, count), pool.widths[slot]))
    return pool


def test_a_slot_returns_what_was_written_and_nothing_lies_beyond_its_corner():
    pool = write(pool_of(WIDE, MIDDLE, NARROW), 0, 20, 40, counts=(1, 2, 3))
    for slot, (start, size) in enumerate([(0, WIDE), (20, MIDDLE), (40, NARROW)]):
        expected = PLAN.corner(full(start, slot + 1), size)
        model = pool.model(slot)
        assert list(model) == list(expected)
        assert all(model[n].dtype == a.dtype and (model[n] == a).all() for n, a in expected.items())
    assert pool.model(2)["in"].tolist() == [[40, 41]]
    assert np.count_nonzero(pool.rows[2]) == 2 + 1 + 1 + 1  # in, out, bias, mean
    assert pool.rows.nbytes == 3 * 13 * 4


def test_bands_are_the_columns_that_exactly_the_same_sizes_have():
    bands = [(b.columns.stop - b.columns.start, b.rank, b.trained) for b in pool_of(WIDE, MIDDLE, NARROW).bands]
    assert bands == [(4, 0, True), (3, 1, True), (3, 2, True), (1, 0, False), (1, 1, False), (1, 2, False)]


def test_three_widths_mixed_by_hand():
    """alpha .75; the wide one takes of the narrow, the middle of the wide, the narrow of the middle one.

    Unit 0 (all three): .75*0 + .25*40 = 10; .75*20 + .25*0 = 15; .75*40 + .25*20 = 35, each plus the entry's number.
    Unit 1: the narrow one lacks it, so the wide one keeps its own: 0; the middle one mixes with the wide: 15.
    Unit 2: only the wide one has it.
    """
    pool = write(pool_of(WIDE, MIDDLE, NARROW), 0, 20, 40, counts=(1, 2, 3))
    pool.mix(cross(3, [0, 1, 2], [2, 0, 1], 0.75))
    wide, middle, narrow = (pool.model(slot) for slot in range(3))
    assert wide["in"].tolist() == [[10, 11], [2, 3], [4, 5]]
    assert middle["in"].tolist() == [[15, 16], [17, 18]]
    assert narrow["in"].tolist() == [[35, 36]]
    assert wide["out"].tolist() == [[20, 11, 12]]
    assert middle["out"].tolist() == [[25, 26]]
    assert narrow["out"].tolist() == [[45]]
    assert [m["bias"].tolist() for m in (wide, middle, narrow)] == [[110], [115], [135]]
    # statistics and counters belong to a width, and each has one slot here
    assert [m["mean"].tolist() for m in (wide, middle, narrow)] == [[0, 1, 2], [20, 21], [40]]
    assert [int(m["n"]) for m in (wide, middle, narrow)] == [1, 2, 3]


def test_each_width_is_pulled_to_its_own_mean_by_hand():
    """Starts 0 (wide) and 40 (narrow). Unit 0: mean 20, half the way is 10 and 30; the rest is the wide one alone."""
    pool = write(pool_of(WIDE, NARROW), 0, 40)
    pool.pull(0.5, pool.means()[0])
    wide, narrow = (pool.model(slot) for slot in range(2))
    assert wide["in"].tolist() == [[10, 11], [2, 3], [4, 5]]
    assert narrow["in"].tolist() == [[30, 31]]
    assert [m["mean"].tolist() for m in (wide, narrow)] == [[0, 1, 2], [40]]


def test_the_global_models_are_means_over_the_slots_that_have_a_value():
    """Starts 0 and 8 (wide), 20 (middle), 40 (narrow). Unit 0: 68/4 = 17; unit 1: 28/3; unit 2: 8/2 = 4."""
    pool = write(pool_of(WIDE, WIDE, MIDDLE, NARROW), 0, 8, 20, 40, counts=(1, 4, 5, 7))
    wide, middle, narrow = (pool.mean(rank=rank) for rank in (2, 1, 0))
    assert wide["in"][0].tolist() == [17, 18]
    np.testing.assert_allclose(wide["in"][1], [28 / 3 + 2, 28 / 3 + 3], rtol=1e-6)
    assert wide["in"][2].tolist() == [8, 9]
    assert (middle["in"] == wide["in"][:2]).all()
    assert (narrow["in"] == wide["in"][:1]).all()
    assert wide["bias"] == middle["bias"] == narrow["bias"] == [117]
    assert [m["mean"].tolist() for m in (wide, middle, narrow)] == [[4, 5, 6], [20, 21], [40]]
    assert [int(m["n"]) for m in (wide, middle, narrow)] == [2, 5, 7]
    assert pool.mean()["out"].tolist() == wide["out"].tolist()


def test_equal_widths_mix_their_statistics():
    pool = write(pool_of(WIDE, NARROW, NARROW), 0, 4, 8, counts=(0, 2, 4))
    pool.mix(cross(3, [0, 1, 2], [1, 2, 0], 0.5))
    assert pool.model(1)["mean"].tolist() == [6]
    assert int(pool.model(1)["n"]) == 3
    assert pool.model(2)["mean"].tolist() == [8]  # its collaborator is wide


@pytest.mark.parametrize("measure", sorted(FROM_GRAM))
def test_similarity_is_measured_on_the_corner_that_both_have(measure):
    generator = np.random.default_rng(3)
    pool = pool_of(WIDE, WIDE, MIDDLE, NARROW)
    models = [{n: generator.normal(size=a.shape).astype(a.dtype) for n, a in full().items()} for _ in range(4)]
    for slot, model in enumerate(models):
        pool.write(slot, PLAN.corner(model, pool.widths[slot]))
    found = similarity(measure, pool, range(4), "parameters")[0]
    for i in range(4):
        for j in range(4):
            size = min(pool.widths[i], pool.widths[j])
            rows = [
                np.concatenate([PLAN.corner(models[s], size)[n].ravel() for n in ("in", "out", "bias")]) for s in (i, j)
            ]
            gram = np.stack(rows).astype(np.float64) @ np.stack(rows).astype(np.float64).T
            if i != j:
                assert found[i, j] == pytest.approx(FROM_GRAM[measure](gram)[0, 1], rel=1e-4, abs=1e-5)


def test_one_width_is_the_plain_pool_to_the_bit():
    generator = np.random.default_rng(5)
    plain, sliced = Pool(Layout.of(full(), {"in", "out", "bias"}), 4), pool_of(*[FULL] * 4)
    for slot in range(4):
        model = {n: generator.normal(size=a.shape).astype(a.dtype) for n, a in full().items()}
        for pool in (plain, sliced):
            pool.write(slot, model)
    columns = plain.layout.columns("parameters")
    assert (
        similarity("cosine", sliced, range(4), "parameters")[0]
        == similarity("cosine", plain, range(4), "parameters")[0]
    ).all()
    mixing = cross(4, [0, 1, 3], [2, 0, 1], 0.7)
    assert (sliced.gram(columns=columns) == plain.gram(columns=columns)).all()
    sliced.mix(mixing)
    plain.mix(mixing)
    assert (sliced.rows == plain.rows).all()
    assert all((sliced.mean()[n] == a).all() for n, a in plain.mean().items())


def test_a_lost_slot_keeps_its_model_and_nobody_takes_of_it():
    pool = write(pool_of(WIDE, MIDDLE, NARROW), 0, 20, 40)
    before = pool.model(1)
    pool.mix(cross(3, [0, 2], [1, 0], 0.5))
    assert all((pool.model(1)[n] == a).all() for n, a in before.items())
    assert pool.model(0)["in"].tolist() == [[20, 21], [2, 3], [4, 5]]


def test_uniform_mixing_gives_every_value_the_mean_of_those_that_have_it():
    pool = write(pool_of(WIDE, MIDDLE, NARROW), 0, 20, 40)
    pool.mix(uniform(3, [0, 1, 2]))
    assert [pool.model(slot)["in"][0, 0] for slot in range(3)] == pytest.approx([20, 20, 20])
    assert [pool.model(slot)["in"][1, 0] for slot in range(2)] == pytest.approx([12, 12])


def test_widths_that_cut_alike_are_compared_and_mixed():
    """.66 and .6 both keep two of three units."""
    pool = write(pool_of(WIDE, Width(0.66), Width(0.6)), 0, 20, 40)
    assert np.isfinite(similarity("cosine", pool, range(3), "parameters")[0]).all()
    pool.mix(cross(3, [0, 1, 2], [1, 2, 0], 0.5))
    assert pool.model(1)["in"][0, 0] == 30


def test_a_pool_without_the_full_width_leaves_the_rest_alone():
    pool = write(pool_of(MIDDLE, NARROW), 20, 40)
    pool.mix(cross(2, [0, 1], [1, 0], 0.5))
    assert pool.mean()["in"].tolist() == [[30, 31], [22, 23]]


def test_the_number_of_models_stays():
    with pytest.raises(ConfigError, match="models"):
        pool_of(WIDE, MIDDLE, NARROW).resize(4)


def test_a_pool_goes_on_from_its_state():
    pool = write(pool_of(WIDE, MIDDLE, NARROW), 0, 20, 40, counts=(1, 2, 3))
    other = pool_of(WIDE, MIDDLE, NARROW)
    other.restore({name: array.copy() for name, array in pool.state().items()})
    assert all((other.model(2)[n] == a).all() for n, a in pool.model(2).items())


def test_among_scales_up_what_is_left():
    mixing = np.array([[0.5, 0.25, 0.25], [0, 1, 0], [1, 0, 0]])
    allowed = np.array([[True, True, False], [True, True, True], [False, False, True]])
    assert among(mixing, allowed).tolist() == [[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 0, 1]]
