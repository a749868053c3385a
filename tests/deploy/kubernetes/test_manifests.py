"""The manifests: each object against the others, against the compose file, and against the API's own fields."""

from __future__ import annotations

import base64
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedcross.core.errors import ConfigError, StorageError
from fedcross.deploy import federation
from fedcross.deploy.device import Device, new_client
from fedcross.deploy.kubernetes.manifests import write
from fedcross.deploy.kubernetes.plan import DEFAULTS, Plan, quantity, read_settings
from fedcross.server import page_variables as page
from tests.conftest import ROOT
from tests.support.command import subcommand

Object = dict[str, Any]
TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, Object] = yaml.safe_load(TEXT)["services"]
NAMES = ("client-1", "client-2", "client-3")
#: Part of the manifests -> service of the compose file.
SAME = {
    "superlink": "superlink",
    "superexec": "superexec",
    "gateway": "gateway",
    "admission": "admission",
    "run": "run",
}
SAME |= {f"device-{name}": name for name in NAMES}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a federation and the bundles of three devices."""
    root = tmp_path_factory.mktemp("kubernetes")
    federation.prepare(root / "keys", [], ["fl.example.org"])
    for number, name in enumerate(NAMES):
        new_client(Device(name, "gateway:8443", number, 3), root / "keys" / "public" / "ca.crt", root)
    return root


def make(place: Path, folder: Path, *more: str) -> list[Object]:
    command = [str(folder), "--keys", str(place / "keys"), *more]
    assert (
        subcommand("deploy")(["kubernetes", *command, *(w for n in NAMES for w in ("--device", str(place / n)))]) == 0
    )
    return [one for path in sorted(folder.iterdir()) for one in yaml.safe_load_all(path.read_text())]


@pytest.fixture(scope="module")
def objects(place: Path) -> list[Object]:
    with pytest.MonkeyPatch.context() as patch:
        for name in DEFAULTS:
            patch.delenv(name, raising=False)
        return make(place, place / "manifests")


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def templates(objects: list[Object]) -> dict[str, Object]:
    """The pods, by their part."""
    found = {**named(objects, "Deployment"), **named(objects, "Job")}
    return {name: one["spec"]["template"] for name, one in found.items()}


def boxes(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def command(template: Object) -> str:
    return " ".join(template["spec"]["containers"][0]["command"])


@pytest.mark.slow
def test_the_parts_are_those_of_the_compose_file(objects: list[Object]) -> None:
    assert set(templates(objects)) == set(SAME)
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] != "Namespace"} == {"fedcross"}
    assert list(named(objects, "Namespace")) == ["fedcross"]


@pytest.mark.parametrize("part", SAME)
def test_every_pod_is_confined_as_its_container_is(objects: list[Object], part: str) -> None:
    spec = templates(objects)[part]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert str(spec["securityContext"]["runAsUser"]) == SERVICES[SAME[part]]["user"].split(":")[0]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for box in boxes(templates(objects)[part]):
        own = box["securityContext"]
        assert own["readOnlyRootFilesystem"] is SERVICES[SAME[part]]["read_only"] is True
        assert own["capabilities"]["drop"] == SERVICES[SAME[part]]["cap_drop"] == ["ALL"]
        assert own["allowPrivilegeEscalation"] is False
        assert set(box["resources"]["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize("part", SAME)
def test_limits_are_those_of_the_compose_file(objects: list[Object], part: str) -> None:
    limits = templates(objects)[part]["spec"]["containers"][0]["resources"]["limits"]
    told = SERVICES[SAME[part]]
    default = re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(told["mem_limit"]))
    if part == "admission":  # a call of a few seconds
        assert limits["memory"] == "1Gi"
    else:
        assert limits["memory"] == quantity(default)
    assert limits["cpu"] == re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(told["cpus"]))


def test_the_defaults_are_those_of_the_compose_file() -> None:
    told = dict(reversed(re.findall(r"\$\{(FEDCROSS_\w+):-([^}]*)\}", TEXT)))  # the GPU profile, below, has more
    assert {name: told[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("part", ["superlink", "superexec", *(f"device-{name}" for name in NAMES)])
def test_the_commands_are_those_of_the_compose_file(objects: list[Object], part: str) -> None:
    told = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", SERVICES[SAME[part]]["command"]).split()
    ours = command(templates(objects)[part]).split()
    if part == "superexec":  # a probe comes from outside the pod
        at = ours.index("--health")
        assert ours[at + 1] == "0.0.0.0:9100"
        del ours[at : at + 2]
    assert sorted(ours) == sorted(told)


def test_run_and_admission_do_what_they_do_under_compose(objects: list[Object]) -> None:
    pods = templates(objects)
    assert command(pods["admission"]).split() == SERVICES["admission"]["command"].split()
    told = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", SERVICES["run"]["command"]).split()
    ours = command(pods["run"])
    assert ours.startswith('sh -c umask 002; exec "$0" "$@" fedcross ')
    assert set(told) <= set(ours.split())
    assert named(objects, "Job")["run"]["spec"]["backoffLimit"] == 0  # a run that failed is not begun again
    assert pods["run"]["spec"]["restartPolicy"] == "Never"


def test_variables_are_those_of_the_compose_file(objects: list[Object]) -> None:
    for part in ("superlink", "superexec", "admission", "run"):
        told = SERVICES[SAME[part]]["environment"]
        box = templates(objects)[part]["spec"]["containers"][0]
        resolved = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)) for name, value in told.items()}
        assert {one["name"]: one["value"] for one in box["env"]} == resolved
    assert {page.PLACE, page.TOKEN_FILE, page.URL} <= set(SERVICES["superexec"]["environment"])


def test_a_small_device_says_its_width_in_the_cluster_too(place: Path, tmp_path: Path) -> None:
    phone = new_client(Device("phone", "gateway:8443", 3, 4, 0.4), place / "keys" / "public" / "ca.crt", tmp_path)
    ours = command(templates(make(place, tmp_path / "manifests", "--device", str(phone)))["device-phone"])
    assert "--partition 3 --partitions 4 --width 0.4" in ours


def test_selectors_find_their_pods_and_nothing_else(objects: list[Object]) -> None:
    pods = {part: template["metadata"]["labels"] for part, template in templates(objects).items()}

    def chosen(selector: Object) -> set[str]:
        return {part for part, labels in pods.items() if selector.items() <= labels.items()}

    for name, one in named(objects, "Deployment").items():
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {name}
        assert one["spec"]["strategy"] == {"type": "Recreate"}
    served = {name: chosen(one["spec"]["selector"]) for name, one in named(objects, "Service").items()}
    assert served == {
        "superlink": {"superlink"}, "superexec": {"superexec"}, "gateway": {"gateway"}, "page": {"gateway"},
    }  # fmt: skip
    for name, one in named(objects, "NetworkPolicy").items():
        assert chosen(one["spec"]["podSelector"]["matchLabels"]) == {name}
    (term,) = templates(objects)["run"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert chosen(term["labelSelector"]["matchLabels"]) == {"superexec"}


def test_every_pod_has_a_policy_and_reaches_what_the_compose_networks_let_it_reach(objects: list[Object]) -> None:
    policies = named(objects, "NetworkPolicy")
    assert set(policies) == set(SAME)

    def ends(rules: list[Object], side: str) -> set[tuple[str, int]]:
        return {
            (who["podSelector"]["matchLabels"]["app.kubernetes.io/component"], port["port"])
            for rule in rules for who in rule.get(side, []) for port in rule["ports"]
        }  # fmt: skip

    for part, one in policies.items():
        assert set(one["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        for target, port in ends(one["spec"]["egress"], "to"):
            back = ends(policies[target]["spec"]["ingress"], "from")
            assert (part, port) in back or (target, port) == ("gateway", 8443)
            shared = set(SERVICES[SAME[part]]["networks"]) & set(SERVICES[target]["networks"])
            assert shared, (part, target)
    for name in NAMES:
        assert ends(policies[f"device-{name}"]["spec"]["egress"], "to") == {("gateway", 8443)}
    openly = [part for part, one in policies.items() for rule in one["spec"]["ingress"] if "from" not in rule]
    assert openly == ["gateway"]


def test_only_the_gateways_door_is_open_to_the_outside(objects: list[Object]) -> None:
    services = named(objects, "Service")
    assert {name for name, one in services.items() if one["spec"]["type"] != "ClusterIP"} == {"gateway"}
    assert [port["port"] for port in services["gateway"]["spec"]["ports"]] == [8443]
    for name, one in services.items():
        part = one["spec"]["selector"]["app.kubernetes.io/component"]
        opened = {port["containerPort"] for box in boxes(templates(objects)[part]) for port in box.get("ports", [])}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= opened, name


def test_every_mount_has_its_volume_and_every_volume_its_source(objects: list[Object]) -> None:
    known = {"secret": named(objects, "Secret"), "configMap": named(objects, "ConfigMap")}
    claims = set(named(objects, "PersistentVolumeClaim"))
    for part, template in templates(objects).items():
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        assert {mount["name"] for box in boxes(template) for mount in box["volumeMounts"]} == set(volumes)
        for name, one in volumes.items():
            (source,) = set(one) - {"name"}
            if source == "secret":
                assert one["secret"]["secretName"] in known["secret"]
            elif source == "configMap":
                assert one["configMap"]["name"] in known["configMap"]
            elif source == "persistentVolumeClaim" and name != "data":
                assert one[source]["claimName"] in claims
        assert len({mount["mountPath"] for mount in boxes(template)[-1]["volumeMounts"]}) == len(
            boxes(template)[-1]["volumeMounts"]
        )
        state = [mount["mountPath"] for mount in boxes(template)[-1]["volumeMounts"]]
        compose = {v.split(":")[1] for v in map(plain, SERVICES[SAME[part]].get("volumes", []))}
        below = {path for path in compose if not path.startswith("/keys/") or path == "/keys/public"}
        assert below <= set(state), part


def plain(volume: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume)


def test_a_part_gets_the_secrets_that_it_has_under_compose_and_no_other(objects: list[Object], place: Path) -> None:
    secrets = named(objects, "Secret")
    for part, template in templates(objects).items():
        got = {
            f"/keys/{one['name'].removeprefix('secret-')}"
            for one in template["spec"]["volumes"] if "secret" in one
        }  # fmt: skip
        told = {v.split(":")[1] for v in map(plain, SERVICES[SAME[part]].get("volumes", [])) if ":/keys/" in v}
        assert got == told - {"/keys/public"}, part
        if got:
            copy = boxes(template)[0]
            assert copy["name"] == "keys"
            assert all(f"install -m 0600 /secrets/{path[6:]}/* {path}/" in copy["command"][-1] for path in got)
            for box in boxes(template)[1:]:
                assert not [m for m in box["volumeMounts"] if m["name"].startswith("secret-")]
    for name in NAMES:
        data = secrets[f"device-{name}-keys"]["data"]
        assert set(data) == {"ca.crt", f"{name}-node.key", "superexec.key"}
        assert base64.b64decode(data[f"{name}-node.key"]) == (place / name / "keys" / f"{name}-node.key").read_bytes()
    everything = "".join(
        base64.b64decode(v).decode(errors="replace") for s in secrets.values() for v in s["data"].values()
    )
    assert (place / "keys" / "authority" / "ca.key").read_text() not in everything
    assert "PRIVATE" not in str(named(objects, "ConfigMap"))


def test_probes_ask_what_the_health_checks_ask(objects: list[Object]) -> None:
    pods = {part: template["spec"]["containers"][0] for part, template in templates(objects).items()}
    for part, box in pods.items():
        assert ("livenessProbe" in box) == (part not in ("admission", "run")) == ("readinessProbe" in box)
    health = SERVICES["superlink"]["healthcheck"]["test"][-1]
    probe = pods["superlink"]["livenessProbe"]["httpGet"]
    assert f"{probe['scheme'].lower()}://localhost:{probe['port']}{probe['path']}" in health
    assert f"('127.0.0.1', {pods['superexec']['livenessProbe']['tcpSocket']['port']})" in str(
        SERVICES["superexec"]["healthcheck"]["test"]
    )
    for name in NAMES:
        told = SERVICES[name]["healthcheck"]["test"]
        assert ["CMD", *pods[f"device-{name}"]["readinessProbe"]["exec"]["command"]] == told
        # The link is no part of it: a device that is cut off goes on training.
        assert "link" not in str(pods[f"device-{name}"]["livenessProbe"])
    code = pods["gateway"]["livenessProbe"]["exec"]["command"][-1]
    assert code.replace("\n", "\\n") in (ROOT / "Dockerfile").read_text()


def test_the_gateway_has_its_own_files_and_looks_names_up_as_the_cluster_does(objects: list[Object]) -> None:
    data = named(objects, "ConfigMap")["gateway-config"]["data"]
    assert set(data) == {"gateway.cfg", "page.cfg", "deadline.lua", "gateway.sh"}
    assert not re.search(r"^ *server .* resolvers", "".join(data.values()), re.MULTILINE)
    assert len(re.findall(r"^ *server .* init-addr libc", "".join(data.values()), re.MULTILINE)) == 4
    mount = templates(objects)["gateway"]["spec"]["containers"][0]
    assert "-f /etc/fedcross/gateway.cfg -f /etc/fedcross/page.cfg" in " ".join(mount["command"])
    assert mount["command"][:3] == ["sh", "/etc/fedcross/gateway.sh", "/keys/server"]  # with the gateway's token
    assert "gateway.token" in named(objects, "Secret")["server-keys"]["data"]
    assert {"name": "config", "mountPath": "/etc/fedcross", "readOnly": True} in mount["volumeMounts"]


def test_secrets_are_for_this_user_only(objects: list[Object], place: Path) -> None:
    folder = place / "manifests"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes["01-secrets.yaml"] == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.slow
def test_settings_come_from_the_file_and_the_shell(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = tmp_path / "env"
    env.write_text(
        "# FEDCROSS_IMAGE=no\nFEDCROSS_IMAGE=r.example/f\nFEDCROSS_CLIENT_MEMORY=512m\nFEDCROSS_RUN=rounds=7 x='a b'\n"
    )
    monkeypatch.setenv("FEDCROSS_CLIENT_CPUS", "2")
    found = make(place, tmp_path / "m", "--env", str(env), "--sample", "--namespace", "fl")
    pods = templates(found)
    device = pods["device-client-1"]["spec"]
    assert device["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "512Mi"}
    assert pods["gateway"]["spec"]["containers"][0]["image"] == "r.example/f-gateway"
    assert pods["run"]["spec"]["containers"][0]["command"][-2:] == ["rounds=7", "x=a b"]
    sample = device["initContainers"][-1]
    assert sample["command"] == ["fedcross", "deploy", "sample", "/data", *NAMES]
    assert {"name": "data", "mountPath": "/data", "subPath": "client-1", "readOnly": True} in device["containers"][0][
        "volumeMounts"
    ]
    assert {one["metadata"].get("namespace", "fl") for one in found} == {"fl"}


def test_words_of_the_run_that_cannot_be_read_are_an_error_in_words(place: Path, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("FEDCROSS_RUN=it's\n")
    made = Plan(place / "keys", (), read_settings(tmp_path / "words", {}))
    with pytest.raises(ConfigError, match="FEDCROSS_RUN=it's: no closing quotation"):
        write(made, tmp_path / "m")


def test_what_cannot_be_is_refused(place: Path, tmp_path: Path) -> None:
    keys, bundle = ["--keys", str(place / "keys")], str(place / "client-1")
    (tmp_path / "used").mkdir(mode=0o700)
    (tmp_path / "used" / "old.yaml").touch()
    new_client(Device("Porch", "gateway:8443", 0, 1), place / "keys" / "public" / "ca.crt", tmp_path)
    federation.prepare(tmp_path / "other", [])
    new_client(Device("away", "gateway:8443", 5, 6), tmp_path / "other" / "public" / "ca.crt", tmp_path)
    new_client(Device("twin", "gateway:8443", 0, 6), place / "keys" / "public" / "ca.crt", tmp_path)
    for wrong, said in (
        ([str(tmp_path / "used"), *keys], "has files"),
        ([str(tmp_path / "a"), "--keys", str(tmp_path)], "Make it: fedcross deploy federation"),
        ([str(tmp_path / "b"), *keys, "--device", str(tmp_path)], "no bundle"),
        ([str(tmp_path / "c"), *keys, "--device", str(tmp_path / "Porch")], "small letters"),
        ([str(tmp_path / "d"), *keys, "--device", str(tmp_path / "away")], "not this federation's"),
        ([str(tmp_path / "e"), *keys, "--device", bundle, "--device", bundle], "name client-1: two devices"),
        ([str(tmp_path / "f"), *keys, "--device", bundle, "--device", str(tmp_path / "twin")], "partition 0: two"),
    ):
        with pytest.raises((ConfigError, StorageError), match=said):
            from fedcross.server.commands.deploy import main

            main(["kubernetes", *wrong])
