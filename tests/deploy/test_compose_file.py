"""What docker-compose.yml and the gateway promise, without an engine. tests/e2e/test_compose.py runs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedcross
from fedcross.engines import guarded
from fedcross.engines.executor import operators

ROOT = Path(fedcross.__file__).resolve().parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CLIENTS = [name for name in SERVICES if name.startswith("client-")]
#: Changes the mode of ./outputs, without a network.
ROOT_SERVICE = "outputs-folder"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "mem_limit" in service
    assert service["pids_limit"] <= (1024 if name.endswith("-gpu") else 256)  # CUDA starts many threads
    assert str(service["cpus"]) == "1" or re.fullmatch(r"\$\{FEDCROSS_(CLIENT|SERVER)_CPUS:-1\}", service["cpus"])
    assert "privileged" not in service
    if name == ROOT_SERVICE:
        assert service["network_mode"] == "none"
        assert service["volumes"] == ["./outputs:/outputs"]
        assert set(service["cap_add"]) == {"CHOWN", "FOWNER", "FSETID"}
    else:
        assert service["user"] == "10001:10001"
        assert "cap_add" not in service


def test_the_operators_token_is_with_those_who_ask_for_it_or_bring_it() -> None:
    users = {n for n, s in SERVICES.items() if any(v.startswith("operator-keys:") for v in s.get("volumes", []))}
    assert {"certificates", "superlink", "superexec", "run", "admission"} <= users
    assert not users & {*CLIENTS, "gateway", "tensorboard", "prometheus", "grafana"}
    for name in users - {"certificates"}:
        assert SERVICES[name]["environment"][operators.VARIABLE] == "/keys/operator/token"
        assert "operator-keys:/keys/operator:ro" in SERVICES[name]["volumes"]


def test_only_the_gateway_and_the_monitors_can_be_reached() -> None:
    assert {name for name, service in SERVICES.items() if "ports" in service} == {"gateway", "tensorboard", "grafana"}
    assert [port for port in SERVICES["gateway"]["ports"] if not port.startswith("127.0.0.1:")] == [
        "${FEDCROSS_BIND:-127.0.0.1}:${FEDCROSS_PORT:-8443}:8443"
    ]
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${FEDCROSS_BIND:-127.0.0.1}:")), name
    networks = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["networks"]
    assert networks["inner"]["internal"] is networks["edge"]["internal"] is True


def test_clients_reach_the_gateway_and_nothing_else() -> None:
    for name, service in SERVICES.items():
        if name in CLIENTS:
            assert service["networks"] == ["edge"]
            # It checks the device's files and gives the SuperNode its secret (tests/deploy/test_federation.py).
            assert service["command"].startswith("fedcross deploy supernode /keys/device ")
            assert "--superlink gateway:8443" in service["command"]
        elif name != "gateway":
            assert "edge" not in service.get("networks", [])
    assert SERVICES["superlink"]["networks"] == SERVICES["superexec"]["networks"] == ["inner"]


def test_every_client_has_its_own_keys_data_and_state() -> None:
    def sources(name: str) -> set[str]:
        return {volume.rsplit(":/", 1)[0] for volume in SERVICES[name]["volumes"]}

    for number in (1, 2, 3):
        assert sources(f"client-{number}") == sources(f"client-{number}-gpu")
        keys = [volume for volume in SERVICES[f"client-{number}"]["volumes"] if "keys" in volume]
        assert keys == [f"client-{number}-keys:/keys/device:ro"]
        for other in {1, 2, 3} - {number}:
            assert not sources(f"client-{number}") & sources(f"client-{other}")


def test_only_the_one_shot_sees_the_authoritys_key() -> None:
    users = {n for n, s in SERVICES.items() if any(v.startswith("authority:") for v in s.get("volumes", []))}
    assert users == {"certificates"}
    users = {n for n, s in SERVICES.items() if any(v.startswith("server-keys:") for v in s.get("volumes", []))}
    assert users == {"certificates", "superlink", "gateway"}  # with it the token that tells the two of each other
    assert "FORWARDED_ALLOW_IPS" not in SERVICES["superlink"]["environment"]  # it would let anybody name addresses


def test_the_three_keys_are_registered_for_the_partitions_that_their_devices_claim() -> None:
    asked = SERVICES["admission"]["command"].split()
    partitions = [asked[place + 1] for place, word in enumerate(asked) if word == "--partition"]
    keys = [word for word in asked if word.endswith(".pub")]
    claimed = [SERVICES[f"client-{i}"]["command"].split("--partition ")[1].split()[0] for i in (1, 2, 3)]
    assert partitions == claimed == ["0", "1", "2"]
    assert keys == [f"/keys/public/client-{i}-node.pub" for i in (1, 2, 3)]


def test_a_client_that_is_revoked_does_not_keep_the_others_from_starting() -> None:
    """They wait until ``admission`` has completed; tests/deploy/kubernetes compares its job with this."""
    assert "--skip-revoked" in SERVICES["admission"]["command"].split()


def test_a_serverapp_may_use_less_memory_than_the_container_of_the_superexec_has() -> None:
    """So a ServerApp that needs more ends with an error, and the SuperExec goes on."""
    service = SERVICES["superexec"]
    own = re.search(r"--memory \$\{FEDCROSS_SERVERAPP_MEMORY:-(\d+)g\}", service["command"])
    whole = re.fullmatch(r"\$\{FEDCROSS_SERVER_MEMORY:-(\d+)g\}", service["mem_limit"])
    assert own is not None
    assert whole is not None
    assert int(own[1]) < int(whole[1])


def test_long_running_services_have_health_checks() -> None:
    for name, service in SERVICES.items():
        # The gateway's stands in its image.
        if service.get("restart") == "unless-stopped" and name != "gateway":
            assert "test" in service["healthcheck"], name


def test_the_gateway_forwards_what_supernodes_call_and_nothing_else() -> None:
    import flwr
    from flwr.supernode import fleet_http_client

    assert flwr.__version__ in guarded.CHECKED, "look again at which paths SuperNodes call"
    source = Path(fleet_http_client.__file__).read_text(encoding="utf-8")
    called = set(re.findall(r'path="([^"]+)"', source))
    # With registered keys nodes are (un)registered at the server, and Flower refuses both from here.
    called -= {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    config = (ROOT / "deploy" / "gateway.cfg").read_text()
    allowed = {path for line in re.findall(r"acl fleet path (.*)", config) for path in line.split()}
    assert allowed == called
    assert len(called) == 10


def test_flowers_pieces_of_arrays_pass_the_gateways_cap() -> None:
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    from fedcross.engines.guarded import MIB_VARIABLE, MOST, MOST_MIB, VARIABLE
    from tests.support.trees import wide

    config = (ROOT / "deploy" / "gateway.cfg").read_text()
    cap, announcement, rest = map(int, re.findall(r"hdr_val\(content-length\) gt (\d+)", config))
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE * 1.1 < cap <= 16 * 2**20
    assert f"path /v1/fleet/push-messages }} {{ req.hdr_val(content-length) gt {announcement}" in config
    # What a little more than the SuperLink takes would be passes too: it refuses that and tells the server.
    largest = PushMessagesRequest(message_object_trees=[wide(MOST - 1)]).ByteSize()
    assert 5 * largest < announcement < 8 * largest
    # No other call is large; Flower writes the hash that `get-fab` asks for to its log.
    assert "acl large path /v1/fleet/push-messages /v1/fleet/push-object\n" in config
    assert f"413 if !large {{ req.hdr_val(content-length) gt {rest} }}" in config
    assert rest <= 16384
    assert SERVICES["superlink"]["environment"][VARIABLE] == f"${{{VARIABLE}:-{MOST}}}"
    assert SERVICES["superlink"]["environment"][MIB_VARIABLE] == f"${{{MIB_VARIABLE}:-{MOST_MIB}}}"


def test_the_gateway_leaves_slots_for_others() -> None:
    """tests/e2e/test_compose.py tries it; here only what must hold between the numbers."""
    config = (ROOT / "deploy" / "gateway.cfg").read_text()
    parts = {part.split("\n", 1)[0]: part for part in config.split("\nbackend ")[1:]}
    slots = {
        name: int(found[1]) for name, part in parts.items() if (found := re.search(r"server .* maxconn (\d+)", part))
    }
    (each,) = map(int, re.findall(r"sc1_conn_cur\(transferring\) gt (\d+)", config))
    few, unknown, known = map(int, re.findall(r"sc0_conn_cur gt (\d+)", config))
    (most,) = map(int, re.findall(r"^    maxconn (\d+)", config, re.MULTILINE))
    many, strangers = sorted(set(map(int, re.findall(r"fe_conn gt (\d+)", config))))
    assert many + 100 * few < strangers
    assert many + 8 * unknown < strangers
    assert 2 * each < slots["transfers"]
    assert slots["newcomers"] < slots["calls"]
    assert unknown < known < most
    assert strangers + known < most
    assert "option disable-h2-upgrade" in config
    assert "wait-for-body" in config


def test_images_stand_on_a_base_named_by_its_digest_and_state_their_version() -> None:
    docker = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.+)$", docker, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"\$\{BASE_IMAGE:-([^}]+)\}", (ROOT / "docker-compose.yml").read_text())) == {base}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"^ARG VERSION=(.+)$", docker, re.MULTILINE) == [project["version"]] * 2
    for stage in ("gateway", "fedcross"):  # the two that are kept
        for label in ("title", "description", "licenses", "version", "revision"):
            assert stages()[stage].count(f"org.opencontainers.image.{label}=") == 1


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name."""
    parts = re.split(r"^FROM \$\{BASE_IMAGE\} AS |^FROM \S+ AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts[1:]}


def test_nothing_can_be_installed_in_a_container() -> None:
    """tests/e2e/test_compose.py looks into the image itself."""
    last = stages()["fedcross"]
    removed = re.search(r"^RUN find / .*-exec rm -rf", last, re.MULTILINE)
    assert removed is not None
    assert all(f"'*/{name}'" in removed[0] for name in ("ensurepip", "bin/pip*"))
    assert "'*-packages/pip'" in removed[0]
    assert "pip install" not in last
    copied = re.findall(r"^COPY --from=\w+ (\S+) /opt/fedcross$", last, re.MULTILINE)
    assert copied == ["/opt/fedcross", "/build/app"]
    assert "python3 -m venv --without-pip /opt/fedcross" in stages()["build"]


def test_the_image_is_for_the_cpu_unless_the_profile_gpu_is_asked_for() -> None:
    """tests/e2e/test_compose.py measures its size."""
    assert re.findall(r"^ARG ACCELERATOR=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE) == ["cpu", "cpu"]
    for stage, step in (("list", "--without-gpu-except"), ("build", "cpu_torch.py")):
        assert re.search(rf'if \[ "\$ACCELERATOR" = cpu \]; then[^;]*{step}', stages()[stage]), stage
    for name, service in SERVICES.items():
        if "build" not in service:
            continue  # another project's image
        gpu = name.endswith("-gpu")
        assert service.get("profiles") == ["gpu"] if gpu else "gpu" not in service.get("profiles", [])
        assert service["build"]["args"].get("ACCELERATOR", "cpu") == ("gpu" if gpu else "cpu")
        assert ("deploy" in service) == gpu


def test_the_build_sees_every_package() -> None:
    """What is not named in .dockerignore is missing in the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        name.strip("/").split("/")[0] for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    }
    named = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert folders <= named


def test_any_user_of_a_bundle_s_container_can_pass_to_its_keys() -> None:
    image = (ROOT / "Dockerfile").read_text()
    assert "install -d -m 0711 -o 10001 -g 10001 /keys;" in image
    assert ' keys="/keys/authority ' in image
