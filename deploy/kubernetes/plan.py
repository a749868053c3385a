"""What a federation's Kubernetes manifests are made of: the compose file's variables, the devices and their keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedcross.core.errors import ConfigError, StorageError

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
