"""FedFan with models of several widths: the rule by hand on each band, whole rounds, resume, the global models."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedcross.strategies.fedfan import FedFan
from fedcross.strategies.method import Round, Upload
from fedcross.tasks.models.width import FULL, Width
from tests.strategies.pool.test_widths import PLAN, full
from tests.strategies.test_fedfan import PLAIN, own_share
from tests.support.command import subcommand
from tests.support.federation import run, same, session
from tests.support.game import Game
from tests.support.slices import POOL, THREE

export_command = subcommand("export")
FAN = (
    *(one for one in POOL if not one.startswith("method")),
    "method=fedfan",
    "method.widths=[1.0,0.66,0.4]",
    "method.reach=0.5",
)
TRAINED = {"in", "out", "bias"}


def begun(**values):
    return Game(FedFan, full(), TRAINED, corners=PLAN, widths=(1.0, 0.66, 0.3), **(PLAIN | values))


def of_every_width(method):
    return method.method.evaluation(method.state).widths


def feed(method, number, *starts):
    """Aggregate uploads whose values are `starts` above those of the initial model."""
    sizes = method.pool.widths
    sent = [
        Upload(slot, slot, PLAN.corner(full(start, slot + 1), sizes[slot]), {}, 1, {})
        for slot, start in enumerate(starts)
    ]
    return method.aggregate(Round(number, 0, (0, 1, 2), 3), sent)


def test_each_value_follows_the_mean_of_those_that_have_it():
    """Uploads 3, 6 and 9 above the start in all values, a = 1/2 in the second round, no push.

    Round 1 (a = 0): the corner of all is at 6, the values of two at 4.5, those of the widest at 3. Round 2 again from
    what the slots send: 3, 6, 9 once more; so the widest's corner becomes (3 + 6)/2.
    """
    method = begun(push=0.0)
    feed(method, 1, 3, 6, 9)
    wide = method.pool.model(0)
    assert (wide["in"] - full()["in"]).tolist() == [[6, 6], [4.5, 4.5], [3, 3]]
    assert (wide["bias"] - full()["bias"]).tolist() == [6]
    assert (wide["mean"] - full()["mean"]).tolist() == [3, 3, 3]  # statistics: of its own width only
    assert (method.pool.model(2)["mean"] - full()["mean"][:1]).tolist() == [9]
    with own_share(0.5):
        feed(method, 2, 3, 6, 9)
    wide, middle, narrow = (method.pool.model(slot) for slot in range(3))
    assert (wide["in"] - full()["in"]).tolist() == [[4.5, 4.5], [3.75, 3.75], [3, 3]]
    assert (middle["in"] - full()["in"][:2]).tolist() == [[6, 6], [5.25, 5.25]]
    assert (narrow["in"] - full()["in"][:1]).tolist() == [[7.5, 7.5]]
    assert [int(model["n"]) for model in (wide, middle, narrow)] == [1, 2, 3]
    assert np.count_nonzero(method.pool.rows[2]) == 2 + 1 + 1 + 1  # nothing beyond the corner


def test_the_push_goes_along_the_part_of_the_step_that_a_slot_has():
    method = begun()
    feed(method, 1, 3, 3, 3)
    assert feed(method, 2, 6, 6, 6)["push"] == pytest.approx(1)
    assert (method.pool.model(0)["in"] - full()["in"]).ravel().tolist() == pytest.approx([9] * 6)
    assert (method.pool.model(2)["in"] - full()["in"][:1]).ravel().tolist() == pytest.approx([9, 9])
    assert (method.pool.model(0)["mean"] - full()["mean"]).tolist() == [6, 6, 6]


def test_the_global_models_average_the_means_of_their_width():
    """Means 3, 6, 9 (widest statistics) and then twice that, of which the second weighs .9."""
    method = begun(push=0.0)
    feed(method, 1, 3, 6, 9)
    feed(method, 2, 6, 12, 18)
    models = of_every_width(method)
    assert list(models) == [FULL, Width(0.66), Width(0.3)]
    assert same(models[FULL], method.global_model())
    np.testing.assert_allclose(models[FULL]["in"] - full()["in"], [[11.4] * 2, [8.55] * 2, [5.7] * 2], rtol=1e-5)
    np.testing.assert_allclose(models[Width(0.3)]["in"] - full()["in"][:1], [[11.4] * 2], rtol=1e-5)
    assert [models[size]["mean"][0] for size in models] == pytest.approx([5.7, 11.4, 17.1])


def test_a_lost_slot_follows_what_it_has():
    method = begun(push=0.0)
    feed(method, 1, 3, 6)
    assert (method.pool.model(2)["in"] - full()["in"][:1]).tolist() == [[3, 3]]  # (3 + 6 + 0) / 3
    assert (method.pool.model(0)["in"] - full()["in"]).tolist() == [[3, 3], [4.5, 4.5], [3, 3]]


@pytest.mark.slow
def test_width_1_everywhere_is_fedfan_to_the_bit(tmp_path):
    settings = (*THREE[:2], "train.lr=0.1", "method=fedfan", "method.reach=0.5")
    plain = run(tmp_path / "plain", *settings)
    sliced = run(tmp_path / "sliced", *settings, "method.widths=[1.0]")
    assert same(plain.driver.global_model(), sliced.driver.global_model())
    assert (plain.driver.state.pool.rows == sliced.driver.state.pool.rows).all()


@pytest.mark.slow
def test_whole_rounds_and_a_resume_with_batch_normalisation(tmp_path):
    whole = session(tmp_path / "whole", *FAN)
    whole.execute()
    lines = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert list(lines[-1]["width_accuracy"]) == ["1", "0.66", "0.4"]
    assert any(0 < line["own_share"] < 1 for line in lines)
    first = session(tmp_path / "half", *FAN, "rounds=2")
    first.execute()
    second = session(tmp_path / "half", *FAN, f"resume={tmp_path / 'half'}")
    second.execute()
    for size, model in whole.driver.evaluation().widths.items():
        assert same(model, second.driver.evaluation().widths[size])


def test_the_first_groups_stay_whole(tmp_path):
    """method.whole=1: AdaptiveFL's slices, the network's first group of channels is in every model."""
    ready = session(tmp_path / "run", *FAN, "method.whole=1")
    ready.execute()
    models = ready.driver.evaluation().widths
    assert list(models) == [FULL, Width(0.66, 1), Width(0.4, 1)]
    first = next(iter(models[FULL]))
    assert {model[first].shape for model in models.values()} == {models[FULL][first].shape}
    assert models[Width(0.4, 1)]["last.weight"].size < models[FULL]["last.weight"].size
