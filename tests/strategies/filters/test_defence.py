"""The defence: numbers worked by hand."""

import numpy as np
import pytest

from fedcross.strategies.filters.defence import Defence, DefenceFilter
from fedcross.strategies.method import Round, Start, Task, Upload
from tests.support.replies import payload_of

START = Start({"w": np.zeros(1, np.float32), "n": np.zeros((), np.int64)}, ("w",))
ROUND = Round(1, 0, (0, 1, 2), 0)


def judged(values, examples=None, extras=None, **settings):
    """Return the verdict on uploads with parameter w of these values, all sent w = 0."""
    defence = DefenceFilter(Defence(enabled=True, **settings), START)
    payloads = {i: payload_of(Task(i, i, START.arrays)) for i in range(len(values))}
    uploads = [
        Upload(
            i, i, {"w": np.array([value], np.float32), "n": np.array(7)},
            {"g": {"v": np.array([extras[i]])}} if extras else {}, (examples or [10] * len(values))[i], {},
        )
        for i, value in enumerate(values)
    ]  # fmt: skip
    return defence.judge(ROUND, uploads, payloads)


def test_far_beyond_is_lost_and_a_little_beyond_is_shortened():
    verdict = judged([1.0, -1.0, 2.0, 3.5])  # the lower median is 1
    assert [upload.slot for upload in verdict.uploads] == [0, 1, 2]
    assert [float(upload.arrays["w"][0]) for upload in verdict.uploads] == [1.0, -1.0, 1.0]
    assert verdict.refused[0][0].slot == 3
    assert verdict.counts["clipped"] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_lost(bad):
    verdict = judged([1.0, 1.0, 1.0, bad])
    assert [upload.slot for upload in verdict.uploads] == [0, 1, 2]


def test_extras_and_examples_are_bounded():
    verdict = judged([1.0, 1.0, 1.0], examples=[10, 10, 1000], extras=[1.0, 1.0, 9.0])
    assert [upload.num_examples for upload in verdict.uploads] == [10, 10, 30]
    assert [float(upload.extras["g"]["v"][0]) for upload in verdict.uploads] == [1.0, 1.0, 3.0]
    assert verdict.counts == {"clipped": 0, "lightened": 1, "extras_bounded": 1}


def alone(defence, value):
    """Judge an exchange of one upload with parameter w = `value`; return whether it counts."""
    upload = Upload(0, 0, {"w": np.array([value], np.float32), "n": np.array(7)}, {}, 10, {})
    return bool(defence.judge(ROUND, [upload], {0: payload_of(Task(0, 0, START.arrays))}).uploads)


def test_a_single_upload_is_judged_by_the_latest_norms():
    """20 norms of 1, then 20 of 2: the median is 2 and the limit 6; the first 20 are forgotten."""
    defence = DefenceFilter(Defence(enabled=True), START)
    for value in [1.0] * 20 + [2.0] * 20:
        assert alone(defence, value)
    assert defence.state == [2.0] * 20
    assert alone(defence, 5.0)
    assert not alone(defence, 7.0)


def test_an_upload_that_nothing_could_judge_is_remembered_with_three_medians_at_most():
    """Of 1 and 100 the lower median is 1: 100 is remembered as 3. Of 1, 3 and 100 it is 3, so the limit is 9."""
    defence = DefenceFilter(Defence(enabled=True), START)
    assert alone(defence, 1.0)
    assert alone(defence, 100.0)
    assert defence.state == [1.0, 3.0]
    assert not alone(defence, 100.0)


def test_what_is_refused_does_not_raise_the_limit():
    defence = DefenceFilter(Defence(enabled=True), START)
    assert all(alone(defence, 1.0) for _ in range(4))
    assert not any(alone(defence, 20.0) for _ in range(60))


def test_the_limits_are_the_settings_and_what_reaches_them_passes():
    """The median is 1: 3 is shortened to 2, is refused beyond 2.9, and is as it was at 3."""
    cut, lost, passed = (judged([1.0, 1.0, 3.0], **own) for own in ({"clip": 2}, {"quarantine": 2.9}, {"clip": 3}))
    assert [float(upload.arrays["w"][0]) for upload in cut.uploads] == [1, 1, 2]
    assert [upload.slot for upload, *_ in lost.refused] == [2]
    assert float(passed.uploads[2].arrays["w"][0]) == 3
    assert (cut.counts["clipped"], lost.counts["clipped"], passed.counts["clipped"]) == (1, 0, 0)
    assert [one.num_examples for one in judged([1.0] * 3, examples=[10, 10, 25], weight=2).uploads] == [10, 10, 20]
    assert judged([1.0, 1.0, 1.0], examples=[10, 10, 30]).counts["lightened"] == 0
