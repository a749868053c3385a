import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.strategies.centralized import Centralized
from fedcross.strategies.defence import rules
from fedcross.strategies.defence.rules import Defence, defend, scale_update, update_norm
from fedcross.strategies.round.base import Method
from fedcross.strategies.solo import Solo
from fedcross.strategies.wire.protocol import Upload
from tests.support.federation import run, same, session

ON = Defence(enabled=True)
MODEL = {"w": np.array([1.0, 1.0], np.float32), "running": np.array([5.0], np.float32), "count": np.array([3])}
PARAMETERS = ("w",)


def uploads(*changes):
    """Return uploads that change `w` by these vectors, its buffer by 100 and its counter by 1."""
    arrays = [
        {"w": MODEL["w"] + np.asarray(u, np.float32), "running": MODEL["running"] + 100, "count": MODEL["count"] + 1}
        for u in changes
    ]
    return [Upload(i, i, a, {}, 1, {}) for i, a in enumerate(arrays)]


def judge(settings, *changes):
    return defend(settings, uploads(*changes), [MODEL] * len(changes), PARAMETERS)


def test_by_hand():
    # Norms 5, 10, 20, 60, 61 -> median 20: limit of quarantine 60 (60 itself stays), of clipping 20.
    # 60 becomes 20: w = 1 + (36, 48) / 3 = (13, 17). Buffer and counter stay as they were sent.
    found = judge(ON, (3, 4), (6, 8), (12, 16), (36, 48), (61, 0))
    assert [u.client for u in found.uploads] == [0, 1, 2, 3]
    assert [(u.client, norm, limit) for u, norm, limit in found.quarantined] == [(4, 61.0, 60.0)]
    assert found.clipped == 1
    assert found.uploads[3].arrays["w"].tolist() == [13, 17]
    assert found.uploads[3].arrays["w"].dtype == np.float32
    assert found.uploads[3].arrays["running"] == 105
    assert found.uploads[3].arrays["count"] == 4


def test_what_is_not_too_large_is_the_same_object():
    given_uploads = uploads((3, 4), (0, 5))
    found = defend(ON, given_uploads, [MODEL, MODEL], PARAMETERS)
    assert [a is b for a, b in zip(found.uploads, given_uploads)] == [True, True]


def test_other_multiples():
    # Median 20; quarantine from 40 on, clip at 10: 5 and 10 stay, 20 is halved to w = (7, 9).
    found = judge(Defence(enabled=True, quarantine=2, clip=0.5), (3, 4), (6, 8), (12, 16), (36, 48), (61, 0))
    assert [u.client for u in found.uploads] == [0, 1, 2]
    assert found.uploads[2].arrays["w"].tolist() == [7, 9]


def test_the_model_that_was_sent_is_what_counts():
    # Three slots with different models; each changes its own by 1.
    models = [{"w": np.full(1, start, np.float32)} for start in (0, 50, 1000)]
    sent = [Upload(i, i, {"w": m["w"] + 1}, {}, 1, {}) for i, m in enumerate(models)]
    assert not defend(ON, sent, models, PARAMETERS).quarantined


def test_beside_idle_ones_a_single_update_counts_only_if_nothing_more_could_be():
    """Of three two are idle: with nothing known before, whether the third is honest cannot be told."""
    zeros = uploads((0, 0), (0, 0), (1, 0))
    assert [u.client for u, *_ in defend(ON, zeros, [MODEL] * 3, PARAMETERS, lone=False).quarantined] == [2]
    assert not defend(ON, zeros, [MODEL] * 3, PARAMETERS).quarantined
    found = defend(ON, zeros, [MODEL] * 3, PARAMETERS, known=0.5, lone=False)
    assert (len(found.uploads), found.clipped, found.uploads[2].arrays["w"][0]) == (3, 1, 1.5)


def test_where_most_are_idle_the_others_are_judged_by_themselves():
    found = judge(ON, *[(0, 0)] * 6, (1, 0), (2, 0), (3, 0), (9, 0))
    assert [(u.client, limit) for u, _, limit in found.quarantined] == [(9, 7.5)]
    assert found.usual == 2.5


@pytest.mark.parametrize(
    ("norms", "known", "lone", "usual", "median"),
    [
        ((), 0, True, 0, None),
        ((0, 0, 0), 2, True, 2, None),
        ((1, 2, 4), 9, True, 2, 2),  # three are enough
        ((1, 2, 4), 0.5, True, 1.5, 2),  # but at most three times what was known
        ((1, 2, 4, 5), 0, True, 3, 3),
        ((0, 1, 2, 40), 0, True, 2, 2),
        ((0, 0, 1, 1, 50, 60), 0, True, 3, 3),  # of the four that count the mean of the middle ones is 25.5
        ((1, 2), 0, True, 1.5, None),
        ((1, 8), 0, True, 3, None),  # not the mean, 4.5, but three times the smaller one
        ((1, 8), 2, True, 3, None),
        ((1, 8), 4, True, 4, None),
        ((4, 8), 1, True, 3, None),
        ((1, 1e6, 1e6), 1, True, 3, None),  # beside these the first one looks idle
        ((1e-6, 1), 2, True, 0.5000005, None),
        ((5,), 0, True, 5, None),
        ((5,), 0, False, 0, None),
        ((5,), 2, False, 2, None),
    ],
)
def test_what_is_usual(norms, known, lone, usual, median):
    assert rules.usual(norms, known, lone) == (pytest.approx(usual), median)


def test_who_returns_the_model_as_it_was_makes_nobody_guilty():
    """Of 0.01, 2 and 8 the median would be 2, and 8 is four times that. Without the idle one it is 5."""
    found = judge(ON, (0.01, 0), (2, 0), (8, 0))
    assert not found.quarantined
    assert [round(float(u.arrays["w"][0]), 3) for u in found.uploads] == [1.01, 3, 6]
    # Of 2 and 18 it is not the mean, 10, but three times the smaller one: 18 is just not too large.
    found = judge(ON, (0.01, 0), (2, 0), (18, 0))
    assert [round(float(u.arrays["w"][0]), 3) for u in found.uploads] == [1.01, 3, 7]
    # Of six, five count.
    found = judge(ON, (0.001, 0), (1, 0), (2, 0), (3, 0), (4, 0), (9.5, 0))
    assert [(u.client, limit) for u, _, limit in found.quarantined] == [(5, 9.0)]


def test_an_idle_upload_hides_no_large_one_of_several():
    found = judge(ON, (0, 0), (1, 0), (1, 0), (7, 0))
    assert [u.client for u, *_ in found.quarantined] == [3]


@pytest.mark.parametrize("norms", [(0, 1, 1e18), (0.005, 1, 1e18), (0, 0, 1, 1e18), (0, 0, 0, 1, 1, 1e18)])
def test_an_idle_upload_makes_no_attacker_usual(norms):
    """Of the two that are left beside the idle one, the mean would be half of what the attacker sends."""
    found = judge(ON, *((norm, 0) for norm in norms))
    assert [u.client for u, *_ in found.quarantined] == [len(norms) - 1]


@pytest.mark.parametrize(
    ("examples", "limit"),
    [(10, 3), (5, 3), (20, 6), (30, 9), (2**40, 9)],  # of 10 in the median: no less, and three times as much at most
)
def test_who_has_more_examples_may_have_a_longer_update(examples, limit):
    for norm, lost in ((limit - 0.01, False), (limit + 0.01, True)):
        ups = [*uploads((1, 0), (1, 0), (1, 0)), *uploads((norm, 0))]
        ups = [replace(u, client=i, num_examples=10) for i, u in enumerate(ups)]
        ups[3] = replace(ups[3], num_examples=examples)
        found = defend(ON, ups, [MODEL] * 4, PARAMETERS)
        assert [(u.client, most) for u, _, most in found.quarantined] == ([(3, limit)] if lost else [])
        assert lost or found.uploads[3].arrays["w"][0] == 2  # shortened to 1 all the same


@pytest.mark.parametrize(("kind", "new"), [("int64", 2**63 - 1), ("int64", -(2**63)), ("uint8", 255), ("bool", True)])
def test_scaled_integers_are_rounded_and_do_not_run_over(kind, new):
    old, sent = np.array([1], kind), np.array([new], kind)
    found = [scale_update({"n": sent}, {"n": old}, ["n"], factor)["n"] for factor in (0, 0.999999999999999999)]
    assert [one.dtype for one in found] == [old.dtype] * 2
    assert int(found[0][0]) == 1
    assert float(found[1][0]) == pytest.approx(float(new))
    assert scale_update({"n": np.array([10])}, {"n": np.array([0])}, ["n"], 0.66)["n"] == [7]


def test_no_uploads_no_judgement():
    assert defend(ON, [], [], PARAMETERS) == rules.Judgement([], [], 0)


def test_infinite_norms_never_pass():
    huge = {"w": np.array([1e308, 1e308])}
    small = {"w": np.zeros(2)}
    with np.errstate(over="ignore"):
        found = defend(ON, [Upload(i, i, huge, {}, 1, {}) for i in range(3)], [small] * 3, PARAMETERS)
    assert (found.uploads, len(found.quarantined), found.lightened) == ([], 3, 0)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9), st.floats(0, 1))
def test_scaling_scales_the_norm(values, factor):
    model = {"w": np.zeros(len(values), np.float32)}
    upload = {"w": np.array(values, np.float32)}
    norm = update_norm(upload, model, PARAMETERS)
    assert norm == pytest.approx(math.sqrt(sum(float(v) ** 2 for v in upload["w"])), rel=1e-6)
    assert update_norm(scale_update(upload, model, PARAMETERS, factor), model, PARAMETERS) == pytest.approx(
        factor * norm, rel=1e-5, abs=1e-30
    )


def test_blocks_give_what_the_whole_gives(monkeypatch):
    generator = np.random.default_rng(0)
    model, upload = ({"w": generator.standard_normal((7, 5)).astype(np.float32)} for _ in range(2))
    norm, scaled = update_norm(upload, model, PARAMETERS), scale_update(upload, model, PARAMETERS, 0.3)
    monkeypatch.setattr(rules, "BLOCK", 4)
    assert update_norm(upload, model, PARAMETERS) == pytest.approx(norm, rel=1e-12)
    assert same(scale_update(upload, model, PARAMETERS, 0.3), scaled)


def test_nothing_is_written_into_an_upload_or_a_model():
    (first, *rest) = uploads((30, 40), (3, 4), (3, 4), (12, 16))
    for array in (*first.arrays.values(), *MODEL.values()):
        array.flags.writeable = False
    try:
        defend(ON, [replace(first), *rest], [MODEL] * 4, PARAMETERS)
    finally:
        for array in MODEL.values():
            array.flags.writeable = True


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


ATTACKED = ("attack=scaling", "attack.clients=1", "clients_per_round=6")


@pytest.mark.parametrize("method", ["fedavg", "fedcross"])
def test_an_attacker_is_quarantined_and_counted_and_the_others_go_on(tmp_path, method):
    finished = run(tmp_path, f"method={method}", "rounds=2", *ATTACKED, "defence.enabled=true")
    for line in lines(tmp_path):
        assert (line["clients"], line["dropped"], line["rejected"]) == (6, 1, {"quarantined": 1})
        assert line["clipped"] >= 1  # of 6 norms, one quarantined, at least one of the others lies above the median
    assert len(finished.method.accepted) == 5


@pytest.mark.parametrize("method", ["fedcross", "masterpull"])
def test_the_slot_of_a_quarantined_reply_becomes_the_mean_of_the_others(tmp_path, method):
    """What was too long may be a repair of a model that somebody has spoiled: it must not stay spoiled."""
    settings = () if method == "masterpull" else ("method.selection=in_order",)
    ready = session(tmp_path, f"method={method}", "rounds=1", *settings, *ATTACKED, "defence.enabled=true")
    seen = []
    ready.method.observer = lambda current, uploads: seen.extend(uploads)
    ready.execute()
    (slot,) = ready.method.doubted
    assert slot not in {upload.slot for upload in seen}
    for name, array in ready.method.pool.model(slot).items():
        np.testing.assert_allclose(
            array, np.mean([upload.arrays[name] for upload in seen], axis=0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_where_clients_carry_a_term_of_their_own_a_long_update_is_only_shortened(tmp_path, method):
    finished = run(tmp_path, f"method={method}", "rounds=2", *ATTACKED, "defence.enabled=true")
    assert [(line["dropped"], line["rejected"]) for line in lines(tmp_path)] == [(0, {})] * 2
    assert len(finished.method.accepted) == 6


def test_off_changes_nothing_and_keeps_nothing(tmp_path):
    finished = run(tmp_path, "rounds=1", *ATTACKED)
    assert lines(tmp_path)[0]["rejected"] == {}
    assert lines(tmp_path)[0]["clipped"] == 0
    assert finished.method._sent == {}


def test_the_result_says_whether_the_defence_was_on_and_a_round_how_many_it_lightened(tmp_path):
    """200 examples over six clients: 34, 34, 33, 33, 33, 33. The median is 33: with a weight of 1 two count as 33."""
    for on, lightened in (("true", 2), ("false", 0)):
        run(tmp_path / on, "rounds=1", "clients_per_round=6", f"defence={{enabled: {on}, weight: 1}}")
        assert lines(tmp_path / on)[0]["lightened"] == lightened
    told = [json.loads((tmp_path / on / "result.json").read_text())["defence"] for on in ("true", "false")]
    assert told == [{"enabled": True, "quarantine": 3.0, "clip": 1.0, "weight": 1.0}, None]


def test_generous_limits_leave_the_run_as_it_was(tmp_path):
    plain = run(tmp_path / "plain", "rounds=2")
    wide = run(tmp_path / "wide", "rounds=2", "defence={enabled: true, quarantine: 1000, clip: 1000}")
    assert same(plain.method.global_model(), wide.method.global_model())


def test_references_are_not_judged():
    assert Method.defended
    assert not Solo.defended
    assert not Centralized.defended


def test_a_client_that_lies_about_its_examples_counts_for_three_medians():
    # 10, 20, 30, 2**40 with median (the lower one) 20: at most 60.
    told = [replace(u, num_examples=n) for u, n in zip(uploads((3, 4), (3, 4), (3, 4), (3, 4)), (30, 10, 2**40, 20))]
    found = defend(ON, told, [MODEL] * 4, PARAMETERS)
    assert [u.num_examples for u in found.uploads] == [30, 10, 60, 20]
    assert found.lightened == 1


def test_who_states_just_the_limit_is_left_alone():
    # 1, 1, 3: the median is 1, the limit 3 by default and 1 with a weight of 1.
    told = [replace(u, num_examples=n) for u, n in zip(uploads((3, 4), (3, 4), (3, 4)), (1, 1, 3))]
    fair, lightened = rules.bounded(told, 3.0)
    assert lightened == 0
    assert all(a is b for a, b in zip(fair, told))
    fair, lightened = rules.bounded(told, 1.0)
    assert ([u.num_examples for u in fair], lightened) == ([1, 1, 1], 1)


def test_only_what_was_sent_and_came_back_is_judged():
    """`a` was sent only and `b` came back only: the update is (3, 4), its half (1.5, 2), and `b` stays."""
    model = {"w": np.array([1.0, 1.0]), "a": np.array([9.0])}
    upload = {"w": np.array([4.0, 5.0]), "b": np.array([100.0])}
    assert update_norm(upload, model, ("w", "a", "b")) == 5
    scaled = scale_update(upload, model, ("w", "a", "b"), 0.5)
    assert {name: array.tolist() for name, array in scaled.items()} == {"w": [2.5, 3], "b": [100]}


def test_of_two_clients_the_smaller_number_decides():
    told = [replace(u, num_examples=n) for u, n in zip(uploads((3, 4), (3, 4)), (2**40, 10))]
    assert [u.num_examples for u in defend(ON, told, [MODEL] * 2, PARAMETERS).uploads] == [30, 10]


@given(st.lists(st.integers(1, 50), min_size=3, max_size=12), st.integers(1, 2**40))
def test_no_single_liar_outweighs_the_honest(honest, lie):
    told = [replace(uploads((3, 4))[0], num_examples=n) for n in [*honest, lie]]
    fair, _ = rules.bounded(told, 3.0)
    assert fair[-1].num_examples <= 3 * max(honest)
    assert [u.num_examples for u in fair[:-1]] == [min(n, 3 * sorted([*honest, lie])[len(honest) // 2]) for n in honest]


WIDTHS = ("method=fedcross", "method.widths=[1.0,0.5]", "method.selection=in_order", "clients_per_round=6")


def test_a_long_update_of_a_slice_is_shortened_and_not_quarantined(tmp_path):
    """Ten times what is usual: in a narrow model, or in a wide one among wide ones, that may be honest."""
    settings = (*WIDTHS, "attack=scaling", "attack.clients=1", "rounds=2", "defence.enabled=true")
    finished = run(tmp_path, *settings)
    assert [(line["dropped"], line["rejected"]) for line in lines(tmp_path)] == [(0, {})] * 2
    assert all(1 <= line["clipped"] <= 6 for line in lines(tmp_path))
    told = finished.method.checkpoint().values["_usual_bands"]
    assert {band: len(lengths) for band, lengths in told["0"].items()} == {"1": 2, "3": 2}
    finished.method.defender.bands = {}
    finished.method.defender.restore({"_usual_bands": told}, 1)
    assert finished.method.defender.bands == {0: {int(band): lengths for band, lengths in told["0"].items()}}


def test_slices_of_one_size_are_judged_as_full_models_are(tmp_path):
    run(tmp_path / "slices", *WIDTHS, "method.widths=[0.5]", "rounds=1", *ATTACKED, "defence.enabled=true")
    assert lines(tmp_path / "slices")[0]["rejected"] == {"quarantined": 1}


def test_the_defence_does_not_take_a_wide_model_for_an_attack():
    """Every value changes by 1: a full model of 100 values has norm 10, slices of 25 values 5. It is shortened."""
    sent = [{"w": np.zeros(count, np.float32)} for count in (100, 25, 25)]
    ups = [Upload(i, i, {"w": model["w"] + 1}, {}, 1, {}) for i, model in enumerate(sent)]
    found = defend(ON, ups, sent, ["w"])
    assert (len(found.uploads), found.clipped, found.usual) == (3, 1, 5)
    assert found.uploads[0].arrays["w"] == pytest.approx(0.5)


def test_a_large_integer_that_the_model_has_too_stays_as_it_is():
    """float64 does not have 2**53 + 1."""
    model, upload = {"n": np.array([2**53 + 1, 0])}, {"n": np.array([2**53 + 1, 10])}
    assert scale_update(upload, model, ["n"], 0.5)["n"].tolist() == [2**53 + 1, 5]
