"""More configurations whose model is the same bytes over processes as on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedcross.conf.compose import join
from fedcross.core.paths import import_root
from fedcross.engines import ray
from fedcross.server.launch import launch
from tests.e2e.test_same_result import CONFIGURATION, SETTINGS, sha


@pytest.mark.slow
@pytest.mark.ray
def test_ray_with_this_folder_as_the_app_gives_the_local_model(tmp_path: Path) -> None:
    output = tmp_path / "flwr-run"
    overrides = join([*CONFIGURATION, f"output={output}"])
    ray.launch(None, overrides, 2, tmp_path / "work", ray.Params(cpus=1), app=import_root())
    assert sha(output) == sha(launch(CONFIGURATION, tmp_path / "local"))


@pytest.mark.slow
@pytest.mark.superlink
def test_models_of_three_widths_over_a_superlink(tmp_path: Path) -> None:
    """Each device gets the slots that it can hold, and what it uploads is the local run's, of nested training too."""
    sizes = [
        "method.widths=[1.0,0.66,0.4]",
        "method.nested=true",
        "devices=three_sizes",
        "devices.shares=[0.34,0.33,0.33]",
    ]
    sizes += ["partition.clients=3", "clients_per_round=3"]
    alone = launch([*SETTINGS, *sizes], tmp_path / "local")
    apart = launch([*SETTINGS, *sizes, "engine=superlink"], tmp_path / "superlink")
    assert sha(alone) == sha(apart)


@pytest.mark.slow
@pytest.mark.superlink
def test_adapters_of_an_own_network_over_a_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the federation find the network, and only its part travels: one device shows it."""
    (tmp_path / "mine" / "e2enets").mkdir(parents=True)
    (tmp_path / "mine" / "e2enets" / "net.py").write_text(
        "from torch import nn\n\n\ndef net(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))\n"
    )
    monkeypatch.setenv("FEDCROSS_PATH", str(tmp_path / "mine"))
    one = [*SETTINGS, "partition.clients=1", "clients_per_round=1"]
    part = ["model=e2enets.net:net", "model.lora={r: 4, target_modules: ['1']}", "train.only=['*lora_*','3.*']"]
    alone = launch([*one, *part], tmp_path / "local")
    apart = launch([*one, *part, "engine=superlink"], tmp_path / "superlink")
    assert sha(alone) == sha(apart)
    assert len(load_file(alone / "model.safetensors")) == 4
