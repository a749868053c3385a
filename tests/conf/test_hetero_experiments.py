"""The experiments with devices of three sizes: every job is valid, and all have one protocol."""

import pytest

from fedcross.conf.schema import load
from fedcross.server.identity import fingerprint
from fedcross.server.sweep import plan

#: Composes a configuration for every job.
pytestmark = pytest.mark.slow


def jobs(name):
    return [load(job) for job in plan([], [f"experiment=hetero/{name}"]).jobs]


def test_the_methods_differ_in_nothing_else():
    configs = [*jobs("widths"), *jobs("fedfan")]
    assert len({fingerprint(config) for config in configs}) == 12
    for config in configs:
        assert tuple(config.method.widths) == (1.0, 0.66, 0.4)
        assert (config.devices.shares, config.devices.widths) == ((0.3, 0.3, 0.4), (1.0, 0.66, 0.4))
        assert (config.rounds, config.clients_per_round, config.evaluate_every) == (400, 10, 5)
        assert (config.names["task"], config.names["model"]) == ("cifar10", "lenet5")
        assert config.partition.beta == 0.5
    assert {config.method.shares for config in configs if config.names["method"].endswith("_three_sizes")} == {
        (0.3, 0.3, 0.4)
    }


def test_the_references_have_one_width_each_and_devices_that_can_hold_it():
    configs = jobs("references")
    assert sorted((config.method.widths, config.seed) for config in configs) == [
        ((width,), seed) for width in (0.4, 1.0) for seed in (1, 2, 3)
    ]
    assert {config.devices.widths for config in configs} == {None}


def test_fedfans_settings_are_those_of_its_records():
    found = {(config.names["method"], config.method.whole, config.method.nested_steps) for config in jobs("fedfan")}
    assert found == {("fedfan_three_sizes", 2, "in_turn")}
