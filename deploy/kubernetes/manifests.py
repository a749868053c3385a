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
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.private_files import private_folder, write_private, write_public
from fedcross.core.trust.keys import SECRET
from fedcross.deploy.federation import GATEWAY as GATEWAY_TOKEN
from fedcross.deploy.federation import OPERATOR, PAGE, TOKEN

from . import parts, pods
from .plan import Plan
from .pods import Object

#: HAProxy's own resolver knows nothing of the cluster's search list, and a service keeps its address.
_RESOLVED, _ONCE = " resolvers docker init-addr last,libc,none", " init-addr libc"
Manifests = dict[str, list[Object]]


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
        "superlink": parts.superlink(plan),
        "superexec": parts.superexec(plan),
        "gateway": parts.gateway(plan),
        "admission": [parts.admission(plan)] if plan.devices else [],
    }
    for device in plan.devices:
        found[device.part] = parts.device(plan, device)
    found["run"] = [parts.run(plan)]
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
    texts = {name: (files("fedcross.deploy") / name).read_text(encoding="utf-8") for name in parts.GATEWAY_FILES}
    gateway = {name: text.replace(_RESOLVED, _ONCE) for name, text in texts.items()}
    return [
        pods.thing("ConfigMap", "public-keys", {"data": public}),
        pods.thing("ConfigMap", "gateway-config", {"data": gateway}),
    ]


def _policies(plan: Plan) -> list[Object]:
    """Return who may reach whom, as the compose file's networks say it; anybody may reach the gateway's port 8443."""
    at_superlink, at_gateway = ("superlink", parts.SUPERLINK), ("gateway", parts.GATEWAY)
    return [
        pods.policy("superlink", [(["superexec", "gateway", "admission", "run"], parts.SUPERLINK)], []),
        pods.policy("superexec", [(["gateway"], parts.OWN_PAGE)], [at_superlink]),
        pods.policy(
            "gateway",
            [([], parts.GATEWAY), (["metrics"], parts.PAGE_PORT)],
            [at_superlink, ("superexec", parts.OWN_PAGE)],
        ),
        pods.policy("admission", [], [at_superlink]),
        pods.policy("run", [], [at_superlink]),
        *(pods.policy(device.part, [], [at_gateway]) for device in plan.devices),
    ]
