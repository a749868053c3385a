"""What is checked of widths before a run has a folder."""

from __future__ import annotations

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.run_setup import check_run
from tests.support.federation import SMALL


def checked(*settings, clients=6):
    config = load([*SMALL, "devices=three_sizes", *settings])
    return check_run(config, config.load_data().task, clients)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["method=fedfan_three_sizes", "method.whole=2"], "method.whole"),
        (["method=heterofl", "method.widths=[1.0,0.9]", "model.hidden=[2]"], "width 0.9"),
        (["method=heterofl", "method.widths=[1.0,0.66,0.665]"], "same network"),
        (["method=adaptivefl", "method.starts=[9]"], "method.starts"),
        (["method=fedfan_three_sizes", "clients_per_round=2"], "clients_per_round"),
        (["method=fedcross", "method.widths=[1.0]", "devices=equal", "devices.widths=[0.66]"], "no device can hold"),
        (["method=heterofl", "devices=equal", "devices.widths=[0.01]"], "no device can hold"),
        (["method=heterofl", "train.only=['*fc1*']"], "train.only"),
    ],
)
def test_widths_that_cannot_work_are_refused(settings, word):
    with pytest.raises(ConfigError, match=word):
        checked(*settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["method=heterofl", "method.widths=[1.0,0.7]"], ["never train"]),
        (["method=heterofl", "method.widths=[1.0,0.7]", "devices=equal"], []),
        (["method=fedcross_three_sizes"], []),
        (["method=adaptivefl"], []),
        (["method=fedavg", "model.hidden=[1]"], []),
        (["method=fedcross", "method.widths=[1.0,0.4]", "method.shares=[0.9,0.1]", "clients_per_round=5"], ["4 slots"]),
        (["method=adaptivefl", "method.starts=[0]", "devices.widths=[1.0,0.66,0.3]"], ["2 of 6 devices"]),
        (["method=heterofl", "method.widths=[1.0,0.4]", "devices=equal", "devices.widths=[0.4]"], ["never trained"]),
    ],
)
def test_devices_without_a_model_and_models_without_a_device_are_told(settings, words):
    found = checked(*settings)
    assert len(found) == len(words)
    assert all(word in remark for word, remark in zip(words, found))
