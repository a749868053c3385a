"""What is checked of slices before a run has a folder."""

from __future__ import annotations

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.slices import check_run
from tests.support.federation import SMALL


def checked(*settings, clients=6):
    config = load([*SMALL, "devices=three_sizes", *settings])
    task = config.load_data().task
    network, _ = config.network(task)
    check_run(config, network, task, clients)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method=fedfan_three_sizes"], "widths=0.66: this network has 1 group of channels, with the first 2 whole"),
        (["method=fedcross_three_sizes", "method.whole=1"], "with the first 1 whole, .* Keep fewer groups whole"),
        (["method=heterofl", "method.widths=[1.0,0.9]", "model.hidden=[2]"], "widths=0.9: .* Leave that width out"),
        (
            ["method=fedfan_three_sizes", "method.whole=0", "clients_per_round=2"],
            "0.66, 0.4]: 2 models; each width needs one. Raise clients_per_round",
        ),
    ],
)
def test_a_narrow_model_must_be_narrow_and_have_a_slot(settings, said):
    with pytest.raises(ConfigError, match=said):
        checked(*settings)


@pytest.mark.parametrize("method", ["fedfan_three_sizes", "fedcross_three_sizes", "heterofl", "adaptivefl"])
def test_the_methods_run_on_a_network_with_one_group(method):
    checked(f"method={method}", *(["method.whole=0"] if method == "fedfan_three_sizes" else []))


def test_methods_without_widths_are_not_looked_at():
    checked("method=fedavg", "model.hidden=[1]")
