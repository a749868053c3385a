"""The parts of a federation as Kubernetes objects: each is the service of ``docker-compose.yml`` with its name."""

from __future__ import annotations

import shlex
from typing import Any

from fedcross.core.errors import ConfigError
from fedcross.deploy.federation import OPERATOR, PAGE, TOKEN

from . import pods
from .plan import Member, Plan
from .pods import Object

SUPERLINK, GATEWAY, PAGE_PORT, HEALTH, OWN_PAGE = 8000, 8443, 8444, 9100, 8080
SERVER_DATA = "server-data"
CACHE = "/tmp/cache"  # noqa: S108 - the pod's own
OPERATOR_FILE = f"{pods.KEYS}/{OPERATOR}/{TOKEN}"
GATEWAY_FILES = ("gateway.cfg", "page.cfg", "deadline.lua", "gateway.sh")
#: As in the Dockerfile and the compose file.
GATEWAY_ANSWERS = (
    "import ssl,urllib.request as r,urllib.error as e\n"
    "c=ssl.create_default_context(cafile='/keys/server/ca.crt')\n"
    "try: r.urlopen('https://localhost:8443/', context=c, timeout=4)\n"
    "except e.HTTPError as x: raise SystemExit(x.code != 403)"
)
#: Alive while its SuperNode answers, so that a cut link ends no training; ready while the SuperLink answers it too.
DEVICE_LINK = ["python3", "-m", "fedcross.engines.executor.link", "9094"]
DEVICE_ANSWERS = "import urllib.request as r; r.urlopen('http://127.0.0.1:9094/health', timeout=4)"


def superlink(plan: Plan) -> list[Object]:
    """Return the SuperLink, its service and the claim of its database."""
    command = "fedcross deploy superlink /keys/server --secret /keys/superexec --database /state/superlink.db"
    health = {"httpGet": {"scheme": "HTTPS", "path": "/health", "port": SUPERLINK}}
    box = pods.container(
        "superlink",
        plan.image,
        [*command.split(), "--host", "0.0.0.0"],  # noqa: S104 - its own pod's; the policies say who reaches it
        {"keys": pods.KEYS, "state": "/state"},
        {"cpu": "1", "memory": "2Gi"},
        env=_env(
            FEDCROSS_OPERATOR_FILE=OPERATOR_FILE,
            **{name: plan.settings[name] for name in ("FEDCROSS_REPLY_OBJECTS", "FEDCROSS_REPLY_MIB")},
        ),
        ports=[{"containerPort": SUPERLINK}],
        **pods.probes(health, period=5, timeout=10, start=300),
    )
    secrets = {"server": "server-keys", "superexec": "superexec-keys", OPERATOR: "operator-keys"}
    template = pods.pod("superlink", [box], {"state": pods.claimed("superlink-state")}, secrets=secrets)
    return [
        pods.claim("superlink-state", "superlink", "5Gi"),
        pods.service("superlink", "superlink", SUPERLINK),
        pods.deployment("superlink", template),
    ]


def superexec(plan: Plan) -> list[Object]:
    """Return what starts the runs' ServerApps, its service and its claims."""
    command = f"fedcross deploy superexec /keys/superexec --superlink superlink:{SUPERLINK} --health 0.0.0.0:{HEALTH}"
    environment = _env(
        FEDCROSS_SHARE="group",
        FEDCROSS_DEVICE="cpu",
        FEDCROSS_RUNS_AT_ONCE=plan.settings["FEDCROSS_RUNS_AT_ONCE"],
        FEDCROSS_PAGE=f"0.0.0.0:{OWN_PAGE}",
        FEDCROSS_PAGE_TOKEN_FILE=f"{pods.KEYS}/{PAGE}/{TOKEN}",
        FEDCROSS_OPERATOR_FILE=OPERATOR_FILE,
        FEDCROSS_PAGE_URL=f"https://localhost:{plan.settings['FEDCROSS_PAGE_PORT']}/",
    )
    box = pods.container(
        "superexec",
        plan.image,
        [*command.split(), "--memory", plan.settings["FEDCROSS_SERVERAPP_MEMORY"]],
        {"keys": pods.KEYS, "state": "/state", "outputs": "/outputs", **_data_mount(plan, "server")},
        plan.limits("SERVER"),
        env=environment,
        ports=[{"containerPort": HEALTH}, {"containerPort": OWN_PAGE}],
        **pods.probes({"tcpSocket": {"port": HEALTH}}, period=10, timeout=10, start=300),
    )
    volumes = {
        "state": pods.claimed("superexec-state"),
        "outputs": pods.claimed("outputs"),
        **_data_volume(plan, SERVER_DATA),
    }
    secrets = {"superexec": "superexec-keys", PAGE: "page-keys", OPERATOR: "operator-keys"}
    template = pods.pod("superexec", [box], volumes, secrets=secrets, first=_sample(plan))
    return [
        pods.claim("superexec-state", "superexec", "5Gi"),
        pods.claim("outputs", "superexec", "10Gi"),
        pods.service("superexec", "superexec", OWN_PAGE),
        pods.deployment("superexec", template),
    ]


def gateway(plan: Plan) -> list[Object]:
    """Return the gateway and its two services: the devices' door and the page's."""
    settings = [f"-f=/etc/fedcross/{name}" for name in GATEWAY_FILES if name.endswith(".cfg")]
    command = ["sh", "/etc/fedcross/gateway.sh", f"{pods.KEYS}/server", "haproxy", "-W", "-db"]
    command += [word for one in settings for word in one.split("=")]
    answers = pods.probes({"exec": {"command": ["python3", "-c", GATEWAY_ANSWERS]}}, period=10, timeout=5, start=60)
    box = pods.container(
        "gateway",
        f"{plan.image}-gateway",
        command,
        {"keys": pods.KEYS, "config": "/etc/fedcross:ro"},
        {"cpu": "1", "memory": "256Mi"},
        ports=[{"containerPort": GATEWAY}, {"containerPort": PAGE_PORT}],
        **answers,
    )
    volumes = {"config": {"configMap": {"name": "gateway-config"}}}
    return [
        pods.service("gateway", "gateway", GATEWAY, "LoadBalancer"),
        pods.service("page", "gateway", PAGE_PORT),
        pods.deployment("gateway", pods.pod("gateway", [box], volumes, secrets={"server": "server-keys"})),
    ]


def admission(plan: Plan) -> Object:
    """Return the job that registers the devices' keys; one that was revoked keeps none of the others out."""
    command = ["fedcross", "deploy", "register", "--skip-revoked"]
    command += [word for device in plan.devices for word in ("--partition", str(device.partition))]
    command += [f"/keys/public/{device.name}-node.pub" for device in plan.devices]
    environment = _env(
        FEDCROSS_SUPERLINK=f"superlink:{SUPERLINK}",
        FEDCROSS_AUTHORITY="/keys/public/ca.crt",
        FEDCROSS_OPERATOR_FILE=OPERATOR_FILE,
    )
    mounts = {"public": "/keys/public:ro", "keys": pods.KEYS}
    box = pods.container("admission", plan.image, command, mounts, {"cpu": "1", "memory": "1Gi"}, env=environment)
    volumes = {"public": {"configMap": {"name": "public-keys"}}}
    template = pods.pod("admission", [box], volumes, secrets={OPERATOR: "operator-keys"}, restart="OnFailure")
    return pods.job("admission", template, again=20)


def _words(settings: str) -> list[str]:
    try:
        return shlex.split(settings)
    except ValueError as error:
        raise ConfigError(f"FEDCROSS_RUN={settings}: {str(error).lower()}. Put a \\ before it, or close it.") from error


def run(plan: Plan) -> Object:
    """Return the job that submits the run and ends as the run does; nothing tries it again by itself."""
    engine = (
        f"engine=remote engine.address=superlink:{SUPERLINK} engine.authority=/keys/public/ca.crt engine.wait_s=900"
    )
    box = pods.container(
        "run",
        plan.image,
        [
            *("sh", "-c", 'umask 002; exec "$0" "$@"', "fedcross"),
            *engine.split(),
            *_words(plan.settings["FEDCROSS_RUN"]),
        ],
        {"public": "/keys/public:ro", "keys": pods.KEYS, "outputs": "/outputs", **_data_mount(plan, "server")},
        {"cpu": "1", "memory": "2Gi"},
        env=_env(FEDCROSS_CACHE=CACHE, FEDCROSS_SHARE="group", FEDCROSS_OPERATOR_FILE=OPERATOR_FILE),
        workingDir="/",
    )
    volumes = {
        "public": {"configMap": {"name": "public-keys"}},
        "outputs": pods.claimed("outputs"),
        **_data_volume(plan, SERVER_DATA),
    }
    first = _sample(plan)
    secrets = {OPERATOR: "operator-keys"}
    template = pods.pod("run", [box], volumes, secrets=secrets, first=first, restart="Never", beside="superexec")
    return pods.job("run", template, again=0)


def device(plan: Plan, member: Member) -> list[Object]:
    """Return a device's SuperNode and the claim of its state."""
    command = f"fedcross deploy supernode /keys/device --name {member.name} --superlink gateway:{GATEWAY}"
    numbers = f"--partition {member.partition} --partitions {member.partitions}"
    numbers += "" if member.width is None else f" --width {member.width}"
    answers = pods.probes({"exec": {"command": ["python3", "-c", DEVICE_ANSWERS]}}, period=30, timeout=10, start=600)
    answers["readinessProbe"] |= {"exec": {"command": DEVICE_LINK}}
    box = pods.container(
        "supernode",
        plan.image,
        [*command.split(), *numbers.split()],
        {"keys": pods.KEYS, "state": "/state", "shm": "/dev/shm", **_data_mount(plan, member.name)},  # noqa: S108
        plan.limits("CLIENT"),
        **answers,
    )
    volumes = {
        "state": pods.claimed(f"{member.part}-state"),
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
        **_data_volume(plan, member.data),
    }
    template = pods.pod(member.part, [box], volumes, secrets={"device": f"{member.part}-keys"}, first=_sample(plan))
    return [pods.claim(f"{member.part}-state", member.part, "5Gi"), pods.deployment(member.part, template)]


def _data_mount(plan: Plan, folder: str) -> dict[str, str]:
    return {f"data/{folder}" if plan.sample else "data": "/data:ro"}


def _data_volume(plan: Plan, name: str) -> dict[str, Object]:
    return {"data": pods.memoryless("512Mi") if plan.sample else pods.claimed(name, read_only=True)}


def _sample(plan: Plan) -> list[Object]:
    """Return the container that writes the digits: the same ones in every pod, as they depend on the names alone."""
    if not plan.sample:
        return []
    command = ["fedcross", "deploy", "sample", "/data", *(device.name for device in plan.devices)]
    environment = _env(FEDCROSS_CACHE="/tmp/cache")  # noqa: S108 - the pod's own
    return [
        pods.container("sample", plan.image, command, {"data": "/data"}, {"cpu": "1", "memory": "1Gi"}, env=environment)
    ]


def _env(**variables: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in variables.items()]
