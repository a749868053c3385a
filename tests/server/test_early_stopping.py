"""Early stopping, from lines of metrics alone."""

import pytest

from fedcross.conf.schema import StopSettings
from fedcross.core.errors import ConfigError
from fedcross.server.metrics import stopped


def run(*values, name="test_accuracy", **settings):
    found = [{"round": i + 1, "test_accuracy": None, name: value} for i, value in enumerate(values)]
    return stopped(found, StopSettings(**settings))


def test_without_settings_a_run_never_stops():
    assert run(0.9, 0.1, 0.1) is None


def test_patience_counts_evaluations_since_the_best():
    assert run(0.5, None, 0.4, patience=2) is None
    found = run(0.5, None, 0.4, 0.5, patience=2)
    assert (found["reason"], found["metric"], found["value"]) == ("patience", "test_accuracy", 0.5)
    assert (found["best"], found["best_round"]) == (0.5, 1)
    assert "since round 1" in found["meaning"]
    assert run(0.5, 0.4, 0.6, 0.5, patience=2) is None


@pytest.mark.parametrize(
    ("name", "values", "stops"), [("test_accuracy", (0.5, 0.8), True), ("test_loss", (0.9, 0.8), False)]
)
def test_a_target_is_reached_upwards_and_a_loss_downwards(name, values, stops):
    assert bool(run(*values, name=name, metric=name, target=0.7)) is stops
    assert run(0.9, 0.7, name="test_loss", metric="test_loss", target=0.7)["reason"] == "target"


def test_a_validation_part_comes_before_the_test():
    lines = [{"round": 1, "test_accuracy": 0.9, "validation_accuracy": 0.5}]
    assert stopped(lines, StopSettings(target=0.6)) is None
    assert stopped(lines, StopSettings(target=0.6, metric="test_accuracy"))["value"] == 0.9


def test_a_metric_that_the_run_does_not_have_is_named():
    with pytest.raises(ConfigError, match="test_accuracy"):
        stopped([{"round": 1, "test_accuracy": 0.5}], StopSettings(patience=1, metric="test_acuracy"))
    assert stopped([{"round": 1, "test_accuracy": None}], StopSettings(patience=1, metric="later")) is None
