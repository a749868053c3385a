"""Kubernetes objects as plain dictionaries: what every pod of a federation has in common, and small ones around it.

Every pod is confined as a container of the compose file is: user 10001, a read-only root, no capabilities, no token of
the cluster, limits of memory and processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]
USER = 10001
APP, PART = "app.kubernetes.io/name", "app.kubernetes.io/component"
#: Where a pod finds the copies of its secrets, and where Kubernetes puts the originals.
KEYS, SECRETS = "/keys", "/secrets"
#: A volume's name -> where it is mounted, beside what a part adds.
SCRATCH = {"tmp": "/tmp", "runtime": "/run/fedcross"}  # noqa: S108 - the container's own


def labels(part: str) -> dict[str, str]:
    """Return the labels by which the pods of `part` are found."""
    return {APP: "fedcross", PART: part}


def thing(kind: str, name: str, spec: Mapping[str, Any], *, api: str = "v1", part: str = "") -> Object:
    """Return an object; `part` is the part of the federation that it belongs to."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels(part or name)}, **spec}


def container(
    name: str, image: str, command: Sequence[str], mounts: Mapping[str, str], limits: Mapping[str, str], **more: Any
) -> Object:
    """Return a confined container; `mounts` maps a volume, or ``volume/folder in it``, to its place.

    A place that ends with ``:ro`` is mounted read-only.
    """
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "volumeMounts": [_mount(volume, place) for volume, place in {**SCRATCH, **mounts}.items()],
        "resources": {"limits": dict(limits), "requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def _mount(volume: str, place: str) -> Object:
    name, _, folder = volume.partition("/")
    path, _, mode = place.partition(":")
    found: Object = {"name": name, "mountPath": path}
    return found | ({"subPath": folder} if folder else {}) | ({"readOnly": True} if mode == "ro" else {})


def copier(image: str, secrets: Sequence[str]) -> Object:
    """Return the first container of a pod: it copies its `secrets` into memory, readable by their user only.

    A mounted secret belongs to root and is open to the pod's group. fedcross refuses such a key, as it may be lost.
    """
    lines = [
        f"install -d -m 0700 {KEYS}/{name} && install -m 0600 {SECRETS}/{name}/* {KEYS}/{name}/" for name in secrets
    ]
    mounts = {"keys": KEYS, **{f"secret-{name}": f"{SECRETS}/{name}:ro" for name in secrets}}
    return container("keys", image, ["sh", "-ec", "\n".join(lines)], mounts, {"cpu": "1", "memory": "128Mi"})


def pod(
    part: str,
    containers: Sequence[Object],
    volumes: Mapping[str, Object],
    *,
    secrets: Mapping[str, str] | None = None,
    first: Sequence[Object] = (),
    restart: str = "Always",
    beside: str = "",
) -> Object:
    """Return a pod template.

    Parameters
    ----------
    part : str
        Of the federation.
    containers : sequence
        Its containers.
    volumes : mapping
        Name -> what the volume is, beside scratch space and secrets.
    secrets : mapping, optional
        Folder below /keys -> name of the secret whose files it gets.
    first : sequence
        Containers that run before, after the one that copies the secrets.
    restart : str
        When the containers are started again.
    beside : str
        A part on whose machine this pod must run, because both mount a volume that one machine can have.
    """
    all_volumes: dict[str, Object] = {"tmp": memoryless("512Mi"), "runtime": memoryless("16Mi"), **volumes}
    before = list(first)
    if secrets:
        all_volumes["keys"] = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
        for folder, name in secrets.items():
            all_volumes[f"secret-{folder}"] = {"secret": {"secretName": name, "defaultMode": 0o440}}
        before.insert(0, copier(containers[0]["image"], list(secrets)))
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": restart,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [{"name": name, **what} for name, what in all_volumes.items()],
    }
    if before:
        spec["initContainers"] = before
    if beside:
        term = {"labelSelector": {"matchLabels": labels(beside)}, "topologyKey": "kubernetes.io/hostname"}
        spec["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"metadata": {"labels": labels(part)}, "spec": spec}


def memoryless(size: str) -> Object:
    """Return scratch space of at most `size` on the machine's disk."""
    return {"emptyDir": {"sizeLimit": size}}


def deployment(part: str, template: Object) -> Object:
    """Return a deployment of one pod, which is stopped before its successor starts: both would have the same state."""
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(part)},
        "template": template,
    }
    return thing("Deployment", part, {"spec": spec}, api="apps/v1")


def job(part: str, template: Object, again: int) -> Object:
    """Return a job that is tried `again` times more after a failure."""
    return thing("Job", part, {"spec": {"backoffLimit": again, "template": template}}, api="batch/v1")


def claim(name: str, part: str, size: str) -> Object:
    """Return a claim for `size` of disk that one machine at a time mounts."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return thing("PersistentVolumeClaim", name, {"spec": spec}, part=part)


def claimed(name: str, *, read_only: bool = False) -> Object:
    """Return the volume of a claim."""
    return {"persistentVolumeClaim": {"claimName": name} | ({"readOnly": True} if read_only else {})}


def service(name: str, part: str, port: int, kind: str = "ClusterIP") -> Object:
    """Return a service `name` in front of `part`'s `port`."""
    spec = {"type": kind, "selector": labels(part), "ports": [{"name": name, "port": port, "targetPort": port}]}
    return thing("Service", name, {"spec": spec}, part=part)


def policy(part: str, comes: Sequence[tuple[Sequence[str], int]], goes: Sequence[tuple[str, int]]) -> Object:
    """Return who may reach `part`, and whom it may reach: parts and ports.

    No part at all in `comes` means anybody. Names are looked up by everybody.
    """
    entering = [
        {"ports": [_port(port)]}
        | ({"from": [{"podSelector": {"matchLabels": labels(one)}} for one in who]} if who else {})
        for who, port in comes
    ]
    leaving: list[Object] = [{"ports": [{"protocol": "UDP", "port": 53}, _port(53)]}]
    leaving += [{"to": [{"podSelector": {"matchLabels": labels(who)}}], "ports": [_port(port)]} for who, port in goes]
    spec = {
        "podSelector": {"matchLabels": labels(part)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": entering,
        "egress": leaving,
    }
    return thing("NetworkPolicy", part, {"spec": spec}, api="networking.k8s.io/v1")


def _port(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def probes(action: Object, *, period: int, timeout: int, start: int) -> dict[str, Object]:
    """Return the three probes: ready and alive by `action`, and at most `start` seconds for the start."""
    every = {**action, "periodSeconds": period, "timeoutSeconds": timeout}
    return {
        "startupProbe": {**action, "periodSeconds": 5, "timeoutSeconds": timeout, "failureThreshold": -(-start // 5)},
        "readinessProbe": {**every, "failureThreshold": 2},
        "livenessProbe": {**every, "failureThreshold": 12},
    }
