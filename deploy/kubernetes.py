"""Writes a federation as plain Kubernetes manifests: the parts of ``docker-compose.yml``, from the same settings.

::

    fedcross deploy federation keys --names fl.example.org
    fedcross deploy new-client --superlink gateway:8443 --partition 0 --partitions 2 keys/public/ca.crt devices porch
    fedcross deploy kubernetes manifests --keys keys --device devices/porch --device devices/barn --env .env
    kubectl apply -f manifests

Keys and certificates are made here and become Secrets, so the authority's key never enters the cluster. What the
compose file does with ``depends_on``, each part does by itself: it ends, or waits, until what it needs is there.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.keys import SECRET
from fedcross.core.private_files import private_folder, write_private, write_public
from fedcross.deploy import pods
from fedcross.deploy.federation import GATEWAY as GATEWAY_TOKEN
from fedcross.deploy.federation import OPERATOR, PAGE, TOKEN
from fedcross.deploy.pods import Object

#: The compose file's variables with its defaults.
DEFAULTS = {
    "FEDCROSS_IMAGE": "fedcross",
    "FEDCROSS_RUN": "task=arrays task.classes=10 task.shape=[1,8,8] task.mean=[0.5] task.std=[0.5] partition=local "
    "method=fedcross clients_per_round=3 rounds=5",
    "FEDCROSS_CLIENT_MEMORY": "3g",
    "FEDCROSS_CLIENT_CPUS": "1",
    "FEDCROSS_SERVER_MEMORY": "4g",
    "FEDCROSS_SERVER_CPUS": "1",
    "FEDCROSS_SERVERAPP_MEMORY": "3g",
    "FEDCROSS_REPLY_OBJECTS": "2048",
    "FEDCROSS_REPLY_MIB": "1024",
    "FEDCROSS_RUNS_AT_ONCE": "1",
    "FEDCROSS_PAGE_PORT": "8444",
}
SUPERLINK, GATEWAY, PAGE_PORT, HEALTH, OWN_PAGE = 8000, 8443, 8444, 9100, 8080
SERVER_DATA = "server-data"
CACHE = "/tmp/cache"  # noqa: S108 - the pod's own
OPERATOR_FILE = f"{pods.KEYS}/{OPERATOR}/{TOKEN}"
GATEWAY_FILES = ("gateway.cfg", "page.cfg", "deadline.lua", "gateway.sh")
#: HAProxy's own resolver knows nothing of the cluster's search list, and a service keeps its address.
_RESOLVED, _ONCE = " resolvers docker init-addr last,libc,none", " init-addr libc"
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
Manifests = dict[str, list[Object]]


@dataclass(frozen=True)
class Member:
    """A device that runs in the cluster: its name, number, how many there are, its keys' folder, its width if told."""

    name: str
    partition: int
    partitions: int
    keys: Path
    width: str | None = None

    @property
    def part(self) -> str:
        """What its objects are called."""
        return f"device-{self.name}"

    @property
    def data(self) -> str:
        """The claim of its data."""
        return f"{self.name}-data"


@dataclass(frozen=True)
class Plan:
    """What the manifests are made of.

    Attributes
    ----------
    keys : Path
        Folder that ``fedcross deploy federation`` made.
    devices : tuple of Member
        Devices in the cluster; others come in through the gateway's service.
    settings : mapping
        The variables of :data:`DEFAULTS`.
    namespace : str
        For all objects.
    sample : bool
        Whether the pods write the digits as sample data, in place of mounting the claims ``server-data`` and
        ``NAME-data``.
    """

    keys: Path
    devices: tuple[Member, ...]
    settings: Mapping[str, str]
    namespace: str = "fedcross"
    sample: bool = False

    def limits(self, who: str) -> dict[str, str]:
        """Return the limits of ``SERVER`` or ``CLIENT``."""
        return {
            "cpu": self.settings[f"FEDCROSS_{who}_CPUS"],
            "memory": quantity(self.settings[f"FEDCROSS_{who}_MEMORY"]),
        }

    @property
    def image(self) -> str:
        """The image of every part but the gateway."""
        return self.settings["FEDCROSS_IMAGE"]


def quantity(size: str) -> str:
    """Return `size` in Docker's notation (``512m``, ``3g``) in that of Kubernetes, where ``m`` means a thousandth."""
    found = re.fullmatch(r"([1-9][0-9]*)([kmg]?)b?", size.strip().lower())
    if found is None:
        raise ConfigError(f"memory {size!r}: give bytes, or a number with k, m or g, for example 3g.")
    return found[1] + {"": "", "k": "Ki", "m": "Mi", "g": "Gi"}[found[2]]


def read_settings(path: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the compose file's variables from the file `path` (``.env``) and from `environment`, which wins.

    Quotes around a value and a comment behind it are left out, as compose does.

    Raises
    ------
    StorageError
        If the file cannot be read.
    ConfigError
        If it is not UTF-8, or a quote in it is not closed on its line.
    """
    told: dict[str, str] = {}
    try:
        lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}). Name the file with the settings.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() in DEFAULTS:
            told[name.strip()] = _value(value.strip(), f"{path}: {name.strip()}")
    return {name: environment.get(name) or told.get(name) or default for name, default in DEFAULTS.items()}


def _value(text: str, where: str) -> str:
    if text[:1] not in ("'", '"'):
        return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()
    found = re.fullmatch(r"""(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?""", text)
    if found is None:
        raise ConfigError(f"{where}: give one value, with its closing quote on the same line.")
    return found[1] if found[2] is None else re.sub(r'\\(["\\$])', r"\1", found[2])


def read_bundle(bundle: Path) -> Member:
    """Return the device whose bundle ``fedcross deploy new-client`` made.

    Raises
    ------
    StorageError
        If the folder is no bundle.
    ConfigError
        If its name cannot be that of a Kubernetes object.
    """
    try:
        services = yaml.safe_load((bundle / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
        ((name, service),) = services.items()
        told = dict(word[2:].split("=", 1) for word in service["command"] if word.startswith("--"))
        member = Member(name, int(told["partition"]), int(told["partitions"]), bundle / "keys", told.get("width"))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"{bundle}: no bundle of a device ({type(error).__name__}). Name a folder that new-client made."
        ) from error
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", name):
        raise ConfigError(f"device {name}: Kubernetes takes small letters, digits and inner hyphens, 50 at most.")
    return member


def write(plan: Plan, folder: Path) -> list[Path]:
    """Write the manifests into the new or empty `folder`, readable by this user only, and return the files.

    Raises
    ------
    StorageError
        If the folder has files, or a key is missing or of another federation.
    ConfigError
        If two devices share a name or a partition.
    """
    _check(plan)
    if any(private_folder(folder).iterdir()):
        raise StorageError(f"{folder}: has files. Name a new folder: an old manifest among new ones would be applied.")
    written = []
    for number, (name, objects) in enumerate(manifests(plan).items()):
        path = folder / f"{number:02}-{name}.yaml"
        text = yaml.safe_dump_all([_in(plan.namespace, one) for one in objects], sort_keys=False, width=120)
        (write_private if name == "secrets" else write_public)(path, text.encode())
        written.append(path)
    return written


def _check(plan: Plan) -> None:
    for what in ("name", "partition"):
        told = [getattr(device, what) for device in plan.devices]
        if twice := sorted({one for one in told if told.count(one) > 1}):
            raise ConfigError(f"{what} {twice[0]}: two devices have it. Each needs its own.")
    authority = _read(plan.keys / "public" / "ca.crt")
    for device in plan.devices:
        if _read(device.keys / "ca.crt") != authority:
            raise StorageError(
                f"{device.keys}/ca.crt: not this federation's authority. Make the bundle with its ca.crt."
            )


def _in(namespace: str, one: Object) -> Object:
    if one["kind"] == "Namespace":
        return one
    return {**one, "metadata": {**one["metadata"], "namespace": namespace}}


def manifests(plan: Plan) -> Manifests:
    """Return the objects by the name of their file, in the order in which they are applied."""
    found: Manifests = {
        "namespace": [_namespace(plan.namespace)],
        "secrets": _secrets(plan),
        "config": _config(plan),
        "policies": _policies(plan),
        "superlink": _superlink(plan),
        "superexec": _superexec(plan),
        "gateway": _gateway(plan),
        "admission": [_admission(plan)] if plan.devices else [],
    }
    for device in plan.devices:
        found[device.part] = _device(plan, device)
    found["run"] = [_run(plan)]
    return {name: objects for name, objects in found.items() if objects}


def _namespace(name: str) -> Object:
    found = pods.thing("Namespace", name, {})
    found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read ({error.strerror}). Make it: fedcross deploy federation."
        ) from error


def _secret(name: str, paths: Sequence[Path]) -> Object:
    data = {path.name: base64.b64encode(_read(path)).decode() for path in paths}
    return pods.thing("Secret", name, {"type": "Opaque", "data": data})


def _secrets(plan: Plan) -> list[Object]:
    server, superexec, page, operator = (plan.keys / name for name in ("server", "superexec", PAGE, OPERATOR))
    found = [
        _secret("server-keys", [server / name for name in ("ca.crt", "server.crt", "server.key", GATEWAY_TOKEN)]),
        _secret("superexec-keys", [superexec / name for name in ("ca.crt", SECRET)]),
        _secret("page-keys", [page / name for name in ("ca.crt", TOKEN)]),
        _secret("operator-keys", [operator / TOKEN]),
    ]
    for device in plan.devices:
        own = [device.keys / name for name in ("ca.crt", f"{device.name}-node.key", SECRET)]
        found.append(_secret(f"{device.part}-keys", own))
    return found


def _config(plan: Plan) -> list[Object]:
    """Return what is no secret: the authority's certificate, the devices' public keys, the gateway's configuration."""
    keys = [device.keys / f"{device.name}-node.pub" for device in plan.devices]
    public = {path.name: _read(path).decode() for path in (plan.keys / "public" / "ca.crt", *keys)}
    texts = {name: (files("fedcross.deploy") / name).read_text(encoding="utf-8") for name in GATEWAY_FILES}
    gateway = {name: text.replace(_RESOLVED, _ONCE) for name, text in texts.items()}
    return [
        pods.thing("ConfigMap", "public-keys", {"data": public}),
        pods.thing("ConfigMap", "gateway-config", {"data": gateway}),
    ]


def _policies(plan: Plan) -> list[Object]:
    """Return who may reach whom, as the compose file's networks say it; anybody may reach the gateway's port 8443."""
    at_superlink, at_gateway = ("superlink", SUPERLINK), ("gateway", GATEWAY)
    return [
        pods.policy("superlink", [(["superexec", "gateway", "admission", "run"], SUPERLINK)], []),
        pods.policy("superexec", [(["gateway"], OWN_PAGE)], [at_superlink]),
        pods.policy("gateway", [([], GATEWAY), (["metrics"], PAGE_PORT)], [at_superlink, ("superexec", OWN_PAGE)]),
        pods.policy("admission", [], [at_superlink]),
        pods.policy("run", [], [at_superlink]),
        *(pods.policy(device.part, [], [at_gateway]) for device in plan.devices),
    ]


def _superlink(plan: Plan) -> list[Object]:
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


def _superexec(plan: Plan) -> list[Object]:
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


def _gateway(plan: Plan) -> list[Object]:
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


def _admission(plan: Plan) -> Object:
    command = ["fedcross", "deploy", "register"]
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


def _run(plan: Plan) -> Object:
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


def _device(plan: Plan, device: Member) -> list[Object]:
    command = f"fedcross deploy supernode /keys/device --name {device.name} --superlink gateway:{GATEWAY}"
    numbers = f"--partition {device.partition} --partitions {device.partitions}"
    numbers += "" if device.width is None else f" --width {device.width}"
    answers = pods.probes({"exec": {"command": ["python3", "-c", DEVICE_ANSWERS]}}, period=30, timeout=10, start=600)
    answers["readinessProbe"] |= {"exec": {"command": DEVICE_LINK}}
    box = pods.container(
        "supernode",
        plan.image,
        [*command.split(), *numbers.split()],
        {"keys": pods.KEYS, "state": "/state", "shm": "/dev/shm", **_data_mount(plan, device.name)},  # noqa: S108
        plan.limits("CLIENT"),
        **answers,
    )
    volumes = {
        "state": pods.claimed(f"{device.part}-state"),
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
        **_data_volume(plan, device.data),
    }
    template = pods.pod(device.part, [box], volumes, secrets={"device": f"{device.part}-keys"}, first=_sample(plan))
    return [pods.claim(f"{device.part}-state", device.part, "5Gi"), pods.deployment(device.part, template)]


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
