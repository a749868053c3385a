from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.federation_config_pb2 import SimulationConfig
from pydantic import ValidationError

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.engines import ray
from fedcross.engines.ray import Params


def test_simulation_superlink_listens_on_loopback_only() -> None:
    command = ray.superlink_command(8000)
    assert Path(command[0]).name == "flower-superlink"
    assert {"--simulation", "--disable-runtime-dependency-installation"} <= set(command)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "8000"


def test_the_resources_are_fields_of_flowers() -> None:
    found = SimulationConfig(**ray.simulation(20, Params(client_cpus=2, client_gpus=0.25, cpus=8, gpus=1)))
    assert (found.num_supernodes, found.client_resources_num_cpus, found.client_resources_num_gpus) == (20, 2, 0.25)
    assert (found.init_args_num_cpus, found.init_args_num_gpus) == (8, 1)
    assert not SimulationConfig(**ray.simulation(20, Params())).HasField("init_args_num_cpus")


def test_an_existing_cluster_is_joined_and_told_what_clients_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(ray.OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FEDCROSS_DATA", "data")
    monkeypatch.setenv("FEDCROSS_STATE", "/shared/states")
    result = ray.ray_environment(Params(address="10.0.0.1:6379"), "/tmp/x")
    assert result["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RAY_TMPDIR" not in result
    variables = {"FEDCROSS_DATA": f"{tmp_path}/data", "FEDCROSS_STATE": "/shared/states"}
    assert json.loads(result["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == {"runtime_env": {"env_vars": variables}}


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"client_cpus": 0}, "greater than or equal to 1"),
        ({"client_gpus": -1}, "greater than or equal to 0"),
        ({"client_cpus": 4, "cpus": 2}, "cpus=2 is less than client_cpus=4, so no client could run"),
        ({"client_gpus": 0.5, "gpus": 0}, r"gpus=0 is less than client_gpus=0.5, so no client could run"),
        ({"address": "10.0.0.1:6379", "cpus": 2}, "has its own cpus and gpus"),
        ({"client_cpu": 1}, "Extra inputs"),
    ],
)
def test_resources_that_let_no_client_run(settings: dict[str, float], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Params.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "found", "cores", "share"),
    [
        ({}, 0, 16, 0.0),  # no GPU, or device=cpu
        ({}, 1, 4, 0.25),  # four clients at once share one
        ({}, 1, 64, 0.125),  # at most eight on one
        ({}, 2, 16, 0.125),
        ({}, 8, 4, 1.0),  # never more than one
        ({"client_cpus": 4}, 1, 12, 0.3333),  # Ray counts ten-thousandths
        ({"cpus": 2}, 1, 64, 0.5),
        ({"gpus": 1}, 4, 8, 0.125),
        ({"gpus": 0}, 4, 8, 0.0),
        ({"client_gpus": 0.5}, 4, 64, 0.5),
        ({"client_gpus": 0}, 4, 64, 0.0),
        ({"address": "10.0.0.1:6379"}, 4, 64, 0.0),  # the GPUs of this machine say nothing of the cluster's
    ],
)
def test_clients_share_the_gpus_that_were_found(settings: dict[str, Any], found: int, cores: int, share: float) -> None:
    assert Params.model_validate(settings).gpu_share(found, cores) == share


@pytest.mark.parametrize(
    ("settings", "device", "fault"),
    [
        ({"client_gpus": 0}, "cuda", "hides the GPUs from such clients"),
        ({}, "cuda:1", "Ray decides which GPU a client gets"),
        ({"address": "10.0.0.1:6379"}, "cuda", "does not know the cluster's GPUs"),
        ({}, "cuda", None),
        ({"address": "10.0.0.1:6379", "client_gpus": 0.5}, "cuda", None),
        ({"client_gpus": 0}, "auto", None),
        ({}, "cpu", None),
    ],
)
def test_a_device_that_ray_would_hide_is_a_fault(settings: dict[str, Any], device: str, fault: str | None) -> None:
    found = Params.model_validate(settings).faults(device)
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_the_whole_configuration_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    with pytest.raises(ConfigError, match="Ray decides which GPU"):
        load(["task=digits", "engine=ray", "device=cuda:1"])
