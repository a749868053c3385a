"""What every method inherits from its contract: the network that it trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.models._split import Split


class Marked(Split):
    """A network whose features begin with an extractor, as FedFusion needs it."""

    def __init__(self) -> None:
        features = nn.Sequential()
        features.add_module("extractor", nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()))
        features.add_module("rest", nn.Sequential(nn.Flatten(), nn.Linear(64, 6)))
        super().__init__(features, nn.Linear(6, 3))
        self.extractor_channels = 4


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("moon", {}),
        ("fedproc", {}),
        ("fedct", {"base": "moon"}),
        ("fedfusion", {"operator": "conv"}),
        ("fedfusion", {"operator": "multi"}),
        ("fedfusion", {"operator": "single"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_method_adds_to_a_network_has_the_networks_dtype(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    kind = method_class(name)
    model = Marked().to(dtype)
    params = kind.Params(**settings)
    built = kind.network(model, params, seed=1)
    assert {one.dtype for one in built.parameters()} == {dtype}
    evaluated = kind.evaluation_network(built, params)
    found: Tensor = evaluated(torch.zeros(2, 1, 4, 4, dtype=dtype))
    assert (found.dtype, found.shape) == (dtype, (2, 3))


@pytest.mark.parametrize("name", ["base", "log", "requests", "tied", "doubted", "spec"])
def test_a_method_that_takes_a_name_of_the_base_class_is_told_at_once(name: str) -> None:
    class Mine(FedAvg):
        def setup(self, arrays: Any) -> None:
            super().setup(arrays)
            self.velocity = dict(arrays)
            setattr(self, own, dict(arrays))

    for own in ("speed", name):
        method = Mine(clients_per_round=1)
        if own == "speed":
            method.begin({"w": np.ones(2, np.float32)})
            continue
        with pytest.raises(ConfigError, match=rf"Mine.setup sets self\.{name}, and Method keeps something else"):
            method.begin({"w": np.ones(2, np.float32)})
