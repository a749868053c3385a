"""The compose file, its settings and the Kubernetes manifests."""

import re
from pathlib import Path

import pytest
import yaml

import fedcross
from fedcross.server.commands.deploy import main as deploy

ROOT = Path(fedcross.__file__).resolve().parents[1]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
NETWORKS = yaml.safe_load(COMPOSE)["networks"]
BASE = ROOT / "deploy" / "kubernetes" / "base"
MANIFESTS = [
    document
    for file in sorted(BASE.glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in yaml.safe_load_all(file.read_text())
]
NAMES = [f"{one['kind']}-{one['metadata']['name']}" for one in MANIFESTS]


def test_eight_containers_one_image_and_twelve_settings():
    started = {name: service for name, service in SERVICES.items() if "profiles" not in service}
    assert len(started) <= 8
    assert len({service["image"] for service in started.values()}) == 1
    used = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE))
    assert used == set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE))
    assert len(used) <= 12
    assert len(COMPOSE.splitlines()) <= 180


def test_deploy_has_at_most_twelve_subcommands(capsys):
    with pytest.raises(SystemExit):
        deploy(["--help"])
    assert len(re.findall(r"^    ([a-z-]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)) <= 12


def test_only_the_gateway_and_grafana_have_ports_and_only_one_is_for_other_machines():
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(ports) == {"gateway", "grafana"}
    bound = [port for found in ports.values() for port in found if not port.startswith("127.0.0.1:")]
    assert bound == ["${FEDCROSS_BIND:-127.0.0.1}:${FEDCROSS_PORT:-8443}:8443"]


def test_superlink_superexec_and_clients_are_on_inner_networks():
    assert all(NETWORKS[name]["internal"] for name in ("inner", "edge", "watch"))
    assert {name: SERVICES[name]["networks"] for name in ("superlink", "superexec", "run")} == {
        "superlink": ["inner"],
        "superexec": ["inner"],
        "run": ["inner"],
    }
    assert all(SERVICES[f"client-{i}"]["networks"] == ["edge"] for i in (1, 2, 3))
    assert SERVICES["setup"]["network_mode"] == "none"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_has_a_memory_limit_and_comes_back(name):
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert (service["user"] == "0:0") == (name == "setup")
    if name not in ("setup", "run", "admin"):
        assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
def test_manifests_fit_the_api_schemas(manifest):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    validate(manifest, "1.32", strict=True)


def test_manifests_refer_to_what_is_there():
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert set(kustomization["resources"]) == {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    claims = {one["metadata"]["name"] for one in MANIFESTS if one["kind"] == "PersistentVolumeClaim"}
    pods = [one["spec"]["template"]["spec"] for one in MANIFESTS if one["kind"] == "Deployment"]
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    assert {
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume
    } == claims
    for pod in pods:
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]["memory"]
        assert container["command"][:3] == ["fedcross", "deploy", "start"]


def test_only_the_gateways_service_is_for_other_machines_and_only_it_reaches_the_superlink():
    services = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS if one["kind"] == "Service"}
    assert [name for name, spec in services.items() if spec.get("type", "ClusterIP") != "ClusterIP"] == ["gateway"]
    assert [port["port"] for port in services["gateway"]["ports"]] == [8443]
    policies = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS if one["kind"] == "NetworkPolicy"}
    sources = [one["podSelector"]["matchLabels"]["app"] for one in policies["superlink"]["ingress"][0]["from"]]
    assert sorted(sources) == ["gateway", "superexec"]


def test_an_overlay_changes_what_the_base_has():
    overlay = BASE.parent / "production"
    names = {(one["kind"], one["metadata"]["name"]) for one in MANIFESTS}
    for patch in yaml.safe_load((overlay / "kustomization.yaml").read_text())["patches"]:
        found = yaml.safe_load((overlay / patch["path"]).read_text())
        assert (found["kind"], found["metadata"]["name"]) in names
