"""Runs of one configuration are seeds of one group; labels name the settings in which groups differ."""

import numpy as np
import pytest

from fedcross.analysis.records import load_runs
from fedcross.analysis.runs import curve, runs_frame
from tests.support.fake import config, write_run


def frame_of(tmp_path, *settings, accuracy=(0.1, 0.2, 0.3)):
    for i, values in enumerate(settings):
        write_run(tmp_path / str(i), list(accuracy), values)
    return runs_frame(load_runs([tmp_path])[0])


def test_seeds_form_one_group_and_fedavg_is_first(tmp_path):
    frame, notes = frame_of(tmp_path, config("fedcross", 1, 3), config("fedcross", 2, 3), config("fedavg", 1, 3))
    assert notes == []
    assert frame["method"].tolist() == ["fedavg", "fedcross", "fedcross"]
    assert frame.groupby("group").size().tolist() == [2, 1]
    assert set(frame["problem"]) == {"cifar10, cnn, dirichlet beta=1.0"}


def test_labels_have_what_differs_among_runs_of_a_method(tmp_path):
    settings = [config("fedcross", 1, 3, method__alpha=alpha) for alpha in (0.9, 0.99)]
    frame, _ = frame_of(tmp_path, *settings, config("fedavg", 1, 3))
    assert frame["method"].tolist() == ["fedavg", "fedcross alpha=0.9", "fedcross alpha=0.99"]


def test_settings_without_effect_do_not_split_a_group(tmp_path):
    """Another folder, an absent and an empty setting, and settings of a defence that is off."""
    plain = config("fedavg", 1, 3)
    other = config("fedavg", 2, 3, output="/tmp/x", defence={"enabled": False, "clip": 5}, train__clip=None)
    frame, _ = frame_of(tmp_path, plain, other)
    assert frame["group"].nunique() == 1


def test_zero_is_a_value(tmp_path):
    frame, _ = frame_of(tmp_path, config("moon", 1, 3, method__mu=0), config("moon", 1, 3, method__mu=1))
    assert frame["method"].tolist() == ["moon mu=0", "moon mu=1"]


def test_of_two_equal_runs_the_longer_counts(tmp_path):
    for name, accuracy in (("a", [0.1, 0.2]), ("b", [0.1, 0.2, 0.3])):
        write_run(tmp_path / name, accuracy, config("fedavg", 1, 3))
    frame, _ = runs_frame(load_runs([tmp_path], unfinished=True)[0])
    assert [run.path.name for run in frame["run"]] == ["b"]


def test_the_same_seed_twice_is_left_out_but_not_on_another_machine(tmp_path):
    frame, (note,) = frame_of(tmp_path, config("fedavg", 1, 3), config("fedavg", 1, 3))
    assert len(frame) == 1
    assert "same configuration and seed" in note
    frame, notes = frame_of(tmp_path / "places", config("fedavg", 1, 3), config("fedavg", 1, 3, engine__name="ray"))
    assert notes == []
    assert frame["method"].tolist() == ["fedavg engine=local", "fedavg engine=ray"]


def test_a_curve_is_the_mean_over_rounds_that_all_seeds_have(tmp_path):
    write_run(tmp_path / "a", [0.1, 0.2, None], config("fedavg", 1, 3))
    write_run(tmp_path / "b", [0.3, None, 0.5], config("fedavg", 2, 3))
    frame, _ = runs_frame(load_runs([tmp_path], unfinished=True)[0])
    points = curve(frame, "bytes")
    assert points.index.tolist() == [1]
    assert points.loc[1].tolist() == pytest.approx([1.5, 0.2, np.std([0.1, 0.3], ddof=1)])
