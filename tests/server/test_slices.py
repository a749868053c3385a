"""What is checked of slices before a run has a folder."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.slices import check_run
from tests.support.federation import SMALL


def checked(*settings, clients=6):
    config = load([*SMALL, "devices=three_sizes", *settings])
    task = config.load_data().task
    network, _ = config.network(task)
    return check_run(config, network, task, clients)


class Softmaxed(nn.Module):
    """A network that cannot be sliced: a softmax over channels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, classes) of pictures (batch, 1, 8, 8)."""
        scores: Tensor = self.last(self.first(x.flatten(1)).softmax(1))
        return scores


OWN = ("model=own", "model.path=tests.server.test_slices:Softmaxed")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method=fedfan_three_sizes", "method.whole=2"], "method.whole=2: this network has 1 group of channels, so"),
        (["method=fedcross_three_sizes", "method.whole=1"], "method.whole=1: .* width 0.66 .* Keep fewer groups"),
        (["method=heterofl", "method.widths=[1.0,0.9]", "model.hidden=[2]"], "widths=0.9: .* Leave that width out"),
        (["method=heterofl", "method.widths=[1.0,0.66,0.665]"], "0.665 and 0.66 cut this network alike. Leave one"),
        (["method=adaptivefl", "method.starts=[9]"], r"method.starts=\[9\]: this network has 1 group .* 0 cuts all"),
        (["method=fedcross_three_sizes", *OWN], "softmax"),
        (
            ["method=fedfan_three_sizes", "clients_per_round=2"],
            "0.66, 0.4]: 2 models; each width needs one. Raise clients_per_round",
        ),
    ],
)
def test_a_narrow_model_must_be_narrow_and_have_a_slot(settings, said):
    with pytest.raises(ConfigError, match=said):
        checked(*settings)


@pytest.mark.parametrize("method", ["fedfan_three_sizes", "fedcross_three_sizes", "heterofl", "adaptivefl"])
def test_the_methods_run_on_a_network_with_one_group(method):
    checked(f"method={method}")


@pytest.mark.parametrize("method", ["fedcross", "heterofl"])
def test_full_models_need_no_slices(method):
    assert checked(f"method={method}", "method.widths=[1.0]", *OWN) == REMARKS[method]


REMARKS = {
    "heterofl": [
        "method.widths=[1.0]: 4 of 6 devices can hold none and never train. A round has so many clients less as it "
        "draws of them."
    ],
    "fedcross": [
        "method.widths=[1.0]: 4 of 6 devices can hold none and never train.",
        "method.widths: slots of width 1: 3, devices that can hold one: 2. So slots wait in every round. Lower "
        "clients_per_round or their share (method.shares).",
    ],
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method=heterofl", "method.widths=[1.0,0.7]"], ["4 of 6 devices can hold none and never train",
          "method.widths=[0.7]: no device trains these"]),
        (["method=heterofl", "method.widths=[1.0,0.7]", "devices=equal"], []),
        (["method=fedcross_three_sizes"], []),
        (["method=fedcross", "method.widths=[1.0,0.4]", "method.shares=[0.9,0.1]", "clients_per_round=5"],
         ["slots of width 1: 4, devices that can hold one: 2."]),
        (["method=fedcross", "method.widths=[1.0,0.7,0.4]", "method.shares=[0.2,0.6,0.2]", "clients_per_round=5",
          "devices.widths=[1.0,0.66,0.4]"], ["slots of width 0.7 or above: 4, devices that can hold one: 2."]),
        (["method=fedcross_three_sizes", "method.k=13", "clients_per_round=2"], []),
        (["method=adaptivefl", "method.starts=[0,1,5]"], ["starts=[0, 1, 5]: this network has 1 group of channels, "
          "counted from 0. A model that cuts from group [1, 5] on would be the full one"]),
        (["method=fedcross_three_sizes", "devices.widths=[1.0,0.66,0.66]"], []),
        (["method=adaptivefl", "method.starts=[0]", "devices.widths=[1.0,0.66,0.3]"], ["2 of 6 devices can hold none"]),
    ],
)  # fmt: skip
def test_devices_without_a_model_and_models_without_a_device_are_told(settings, said):
    found = checked(*settings)
    assert len(found) == len(said)
    assert all(part in remark for part, remark in zip(said, found))


def test_methods_without_widths_are_not_looked_at():
    checked("method=fedavg", "model.hidden=[1]")
