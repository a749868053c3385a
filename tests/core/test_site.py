from __future__ import annotations

import pytest
import torch

from fedcross.core.errors import ConfigError
from fedcross.core.site import DEVICE, GRAPHS, device_name, gpus_for, uses_graphs
from fedcross.engines.local import Params, cores


def test_the_site_s_device_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    assert device_name("cuda") == "cuda"
    monkeypatch.setenv(DEVICE, "mps")
    assert device_name("cuda") == "mps"
    monkeypatch.setenv(DEVICE, "cuda:x")
    with pytest.raises(ConfigError, match="cuda:x"):
        device_name("cpu")


@pytest.mark.parametrize(("name", "found"), [("auto", 4), ("cuda", 4), ("cuda:3", 1), ("cpu", 0), ("mps", 0)])
def test_how_many_gpus_clients_may_use(monkeypatch: pytest.MonkeyPatch, name: str, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_for(name) == found


def test_one_worker_per_gpu_in_place_of_one_per_core() -> None:
    assert Params().count(2) == 2
    assert Params().count() == cores()
    assert Params(workers=7).count(2) == 7


def test_a_site_may_train_without_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GRAPHS, raising=False)
    assert uses_graphs()
    monkeypatch.setenv(GRAPHS, "off")
    assert not uses_graphs()
    monkeypatch.setenv(GRAPHS, "0")
    with pytest.raises(ConfigError, match="FEDCROSS_GRAPHS='0': choose on or off"):
        uses_graphs()
