from dataclasses import replace

import numpy as np
import pytest

from fedcross.strategies.defence.buffers import bound, without_variances_below_zero
from fedcross.strategies.wire.protocol import Upload
from tests.support.federation import session

MODEL = {
    "w": np.zeros(2, np.float32),
    "norm.running_mean": np.zeros(4, np.float32),
    "norm.running_var": np.ones(4, np.float32),
    "count": np.array([3]),
}
TRAINED = ("w",)
NAMES = ("norm.running_mean", "norm.running_var", "count")


def upload(client, mean=0.0, var=1.0, count=4, w=1.0):
    """Return an upload whose means, variances and weights are all `mean`, `var` and `w`."""
    statistics = {NAMES[0]: np.full(4, mean, np.float32), NAMES[1]: np.full(4, var, np.float32)}
    return Upload(client, client, {"w": np.full(2, w, np.float32), **statistics, "count": np.array([count])}, {}, 1, {})


def means(judgement):
    return [float(u.arrays["norm.running_mean"][0]) for u in judgement.uploads]


def test_by_hand():
    """Changes of 1, 2, 4 and 100: usual is 3, so at most 9 (three times). The counter's: 1, 1, 1, so at most 3 more."""
    ups = [upload(0, 1), upload(1, 2), upload(2, -4), upload(3, 100, count=2**62)]
    found, usual = bound(ups, [MODEL] * 4, TRAINED, NAMES, 3.0, {})
    assert means(found) == [1, 2, -4, 9]
    assert (found.clipped, found.quarantined) == (1, [])
    assert usual == {"norm.running_mean": 3, "norm.running_var": 0, "count": 1}
    assert found.uploads[3].arrays["norm.running_mean"].dtype == np.float32
    assert (found.uploads[3].arrays["count"], found.uploads[3].arrays["count"].dtype) == ([6], np.int64)
    assert [a is b for a, b in zip(found.uploads, ups)] == [True, True, True, False]
    assert (ups[3].arrays["norm.running_mean"] == 100).all()


@pytest.mark.parametrize(("name", "value"), [("norm.running_mean", 1e6), ("norm.running_mean", 1e-9), ("count", -5)])
@pytest.mark.parametrize("hostile", [1, 2])
def test_what_most_leave_as_it_was_is_a_constant(name, value, hostile):
    ups = [upload(i, count=3) for i in range(5)]
    for i in range(hostile):
        ups[i] = replace(ups[i], arrays={**ups[i].arrays, name: np.full_like(MODEL[name], value)})
    found, usual = bound(ups, [MODEL] * 5, TRAINED, NAMES, 3.0, {})
    assert all((u.arrays[name] == MODEL[name]).all() for u in found.uploads)
    assert (found.clipped, usual) == (hostile, dict.fromkeys(NAMES, 0))
    for few in ups[:1], ups[:2], ups[:3:2]:  # what is known counts where few reply, also of two that agree
        found, _ = bound(few, [MODEL] * len(few), TRAINED, NAMES, 3.0, usual)
        assert all((u.arrays[name] == MODEL[name]).all() for u in found.uploads)


def test_of_two_an_entry_that_one_leaves_as_it_was_is_a_constant_unless_it_was_seen_to_change():
    ups = [upload(0), upload(1, 5)]
    assert means(bound(ups, [MODEL] * 2, TRAINED, NAMES, 3.0, {})[0]) == [0, 0]
    assert means(bound(ups, [MODEL] * 2, TRAINED, NAMES, 3.0, {"norm.running_mean": 1.0})[0]) == [0, 3]


def test_idle_devices_make_nothing_a_constant():
    """Six of ten return the model as it was; the statistics of the four others count."""
    ups = [upload(i, w=0) for i in range(6)] + [upload(i, 1 + i) for i in range(6, 10)]
    found, usual = bound(ups, [MODEL] * 10, TRAINED, NAMES, 3.0, {})
    assert means(found) == [0] * 6 + [7, 8, 9, 10]
    assert usual["norm.running_mean"] == 8.5


def test_an_idle_device_changes_no_constant():
    """It trains nothing and sends another table; nobody else shows whether this is one."""
    assert means(bound([upload(0, 7, w=0)], [MODEL], TRAINED, NAMES, 3.0, {})[0]) == [0]


def test_a_majority_of_one_round_moves_statistics_by_three_times_three_at_most():
    ups = [upload(0, 1), upload(1, 1e30), upload(2, 1e30)]
    found, usual = bound(ups, [MODEL] * 3, TRAINED, NAMES, 3.0, {"norm.running_mean": 1.0})
    assert means(found) == pytest.approx([1, 9, 9])
    assert "norm.running_mean" not in usual


@pytest.mark.parametrize("value", [1e30, 3e38, -3e38])
def test_no_value_is_too_large_to_be_shortened(value):
    found, _ = bound([upload(i, m) for i, m in enumerate((1, 1, 1, value))], [MODEL] * 4, TRAINED, NAMES, 3.0, {})
    assert means(found) == pytest.approx([1, 1, 1, 3 * np.sign(value)], rel=1e-5)


def test_few_uploads_are_compared_with_what_was_usual_before():
    """Of two the usual change is at most three times the smaller one; a lone one has none beside it."""
    ups = [upload(0, 1), upload(1, 50)]
    known = {"norm.running_mean": 2.0}
    found, usual = bound(ups, [MODEL] * 2, TRAINED, NAMES, 3.0, known)
    assert (means(found), usual) == ([1, 9], {})
    assert means(bound(ups, [MODEL] * 2, TRAINED, NAMES, 3.0, {})[0]) == [1, 9]  # three times three of the smaller one
    assert means(bound(ups[1:], [MODEL], TRAINED, NAMES, 3.0, known)[0]) == [6]


def test_an_entry_that_a_method_does_not_send_is_not_judged():
    short = replace(upload(0), arrays={"w": np.ones(2, np.float32)})
    found, usual = bound([short] * 3, [MODEL] * 3, TRAINED, (*NAMES, "other"), 3.0, {})
    assert (found.uploads, found.clipped, usual) == ([short] * 3, 0, {})


def test_a_variance_below_zero_is_none_unless_it_was_sent_so():
    below = {**MODEL, "norm.running_var": np.full(4, -1, np.float32)}
    ups = [upload(0), upload(1, var=-2), upload(2, mean=-2), upload(3, var=-2)]
    found = without_variances_below_zero(ups, [MODEL, MODEL, MODEL, below])
    assert [u.client for u in found.uploads] == [0, 2, 3]
    assert [(u.client, low, limit) for u, low, limit in found.quarantined] == [(1, -2, 0)]


@pytest.mark.parametrize(("name", "value"), [("running_mean", 1e30), ("running_var", -1e3)])
@pytest.mark.parametrize("method", ["fedavg", "fedcross", "fedmr", "scaffold"])
def test_one_device_of_six_decides_nothing(tmp_path, monkeypatch, method, name, value):
    """Without the rule the global model is a guess, or no answer of it is a number."""
    model = ("model=own", "model.path=tests.support.slices:Normed")
    on = ("clients_per_round=6", "defence.enabled=true")
    ready = session(tmp_path, f"method={method}", *model, *on, "rounds=2")
    defend = ready.method._defend
    hostile = []

    def poisoned(uploads):
        arrays = {n: np.full_like(a, value) if n.endswith(name) else a for n, a in uploads[0].arrays.items()}
        hostile.append(uploads[0].client)
        return defend([replace(uploads[0], arrays=arrays), *uploads[1:]])

    monkeypatch.setattr(ready.method, "_defend", poisoned)
    ready.execute()
    assert hostile
    statistics = {n: a for n, a in ready.method.global_model().items() if "running_" in n}
    assert statistics
    assert all(np.isfinite(a).all() and np.abs(a).max() < 100 for a in statistics.values())
    assert all((a >= 0).all() for n, a in statistics.items() if n.endswith("running_var"))
    kept = ready.method.defender.buffers
    assert all(n in kept[0] for n in statistics)
