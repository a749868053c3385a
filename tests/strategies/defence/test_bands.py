"""The bands of slices: by hand, against sets of values, and what one device may do in a band that few have."""

import numpy as np
import pytest

from fedcross.strategies.defence import bands as module
from fedcross.strategies.defence.bands import Bands
from fedcross.strategies.wire.protocol import Upload
from fedcross.tasks.models.slicing.plan import FULL, Group, Plan, Segment, Size

HIDDEN, GATES = (Segment(0, 1),), (Segment(0, 1), Segment(0, 1))
#: Three hidden units: widths 1, .66 (2 units) and .3 (1 unit); two inputs, one class.
PLAN = Plan((Group(3),), {"in": (HIDDEN, None), "out": (None, HIDDEN)}, {"in": (3, 2), "out": (1, 3)})
MIDDLE, NARROW = Size(0.66), Size(0.3)
BANDS = Bands(PLAN, (FULL, MIDDLE, NARROW))
NAMES = ("in", "out", "bias", "scale")


def zeros(kind=np.float32):
    return {"in": np.zeros((3, 2), kind), "out": np.zeros((1, 3), kind), "bias": np.zeros(1, kind), "scale": kind(0)}


def upload(size, narrow=0.0, middle=0.0, wide=0.0):
    """Return a slice that changes one value of each band that `size` has, and the slice that was sent: zeros."""
    changed = {name: np.array(array) for name, array in zeros().items()}
    changed["in"][:, 0] = (narrow, middle, wide)
    return PLAN.corner(changed, size), PLAN.corner(zeros(), size)


def judged(*slices, most=3.0, known=None):
    """Return the uploads, what :meth:`Bands.shortened` makes of them, and the medians."""
    ups = [Upload(i, i, arrays, {}, 1, {}) for i, (arrays, _) in enumerate(slices)]
    return ups, *BANDS.shortened(ups, [model for _, model in slices], NAMES, most, known or {})


def test_lengths_by_hand():
    """7 is what all three sizes have, 3 what the two wider ones have, 1 what only the widest has."""
    model = zeros()
    new = {"in": model["in"] + np.array([[3, 0], [0, 5], [0, 12]]), "out": np.array([[4.0, 0, 5]])}
    new |= {"bias": model["bias"] + 12, "scale": np.float32(0)}
    assert BANDS.lengths(new, model, NAMES) == {7: 13, 3: 5, 1: 13}
    narrow = PLAN.corner(new, NARROW)
    assert BANDS.lengths(narrow, PLAN.corner(model, NARROW), NAMES) == {7: 13}


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
@pytest.mark.parametrize("sizes", [(FULL, Size(0.5), Size(0.25)), (FULL, Size(0.5), Size(0.25, 1), Size(0.75, 1))])
def test_a_band_is_what_the_same_sizes_have(monkeypatch, sizes, block):
    """Also where sizes do not lie within each other, and where the channels of a slice are no run."""
    monkeypatch.setattr(module, "BLOCK", block)
    entries = {"a": ((Segment(0, 2), Segment(-1, 1)), GATES), "b": (GATES, (Segment(1, 1),)), "c": ((Segment(1, 1),),)}
    shapes = {"a": (9, 8), "b": (8, 4), "c": (4,)}
    plan, start = Plan((Group(4), Group(4)), entries, shapes), iter((0, 72, 104, 108))
    ids = {
        name: np.arange(np.prod(shape)).reshape(shape) + next(start) for name, shape in (shapes | {"d": (3,)}).items()
    }
    having = [{int(one) for array in plan.corner(ids, size).values() for one in array.flat} for size in sizes]
    change = np.random.default_rng(0).standard_normal(111)
    for own, size in zip(having, sizes):
        model = {name: array.astype(np.float64) for name, array in plan.corner(ids, size).items()}
        new = {name: array + change[array.astype(int)] for name, array in model.items()}
        squares: dict[int, float] = {}
        for one in own:
            band = sum(1 << bit for bit, others in enumerate(having) if one in others)
            squares[band] = squares.get(band, 0) + change[one] ** 2
        found = Bands(plan, sizes).lengths(new, model, tuple(ids))
        assert found == {band: pytest.approx(square**0.5) for band, square in squares.items()}
        scaled = Bands(plan, sizes).scaled(new, model, tuple(ids), dict.fromkeys(found, 0.5))
        for name in ids:
            np.testing.assert_allclose(scaled[name], model[name] + 0.5 * (new[name] - model[name]))


def test_a_whole_length_in_what_few_have_is_shortened_to_what_is_usual_there():
    """Of three wide devices two change it by 1: 50 becomes 3. What all have is bounded by the whole length alone."""
    others = [upload(FULL, 5, 5, 1), upload(FULL, 6, 5, 1), upload(MIDDLE, 40, 20), upload(NARROW, 5)]
    ups, kept, medians = judged(upload(FULL, 5, 5, 50), *others)
    assert kept[0].arrays["in"][:, 0].tolist() == [5, 5, 3]
    assert ups[0].arrays["in"][2, 0] == 50
    assert kept[3].arrays["in"][:, 0].tolist() == [40, 15]
    assert [new is old for new, old in zip(kept, ups)] == [False, True, True, False, True]
    assert medians == {7: 5, 3: 5, 1: 1}


def test_integers_are_rounded():
    model = PLAN.corner(zeros(np.int64), NARROW)
    assert BANDS.scaled({**model, "bias": np.array([5])}, model, NAMES, {7: 0.5})["bias"].tolist() == [2]


@pytest.mark.parametrize(("wide", "known", "left"), [((50, 1), {}, 9), ((50,), {}, 50), ((50,), {1: 1}, 3)])
def test_few_in_a_band_are_judged_by_what_was_usual_before(wide, known, left):
    """Of two the limit is three times what both may be; one alone is usual if nothing is known."""
    _, kept, medians = judged(*(upload(FULL, 1, 1, one) for one in wide), *[upload(MIDDLE, 1, 1)] * 2, known=known)
    assert kept[0].arrays["in"][2, 0] == pytest.approx(left)
    assert 1 not in medians


def test_what_is_infinite_is_left_to_the_judgement_of_the_whole():
    slices = [upload(FULL, 1, 1, 1)] * 3
    huge = {name: array.astype(np.float64) + 1e200 for name, array in slices[0][0].items()}
    with np.errstate(over="ignore"):
        ups, kept, _ = judged((huge, slices[0][1]), *slices)
    assert kept[0] is ups[0]
