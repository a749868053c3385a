"""The bundle of a new device: one tar file with its keys and the files that start it.

::

    NAME/keys/                      ca.crt NAME-node.key NAME-node.pub superexec.key
    NAME/data/  state/  own/        its examples; what it keeps between rounds; methods, models and tasks of your own
    NAME/docker-compose.yml  .env   to run it in a container ...
    NAME/fedcross-NAME.service      ... or as a systemd service
    NAME/README.md
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import IO

from fedcross.core.errors import ConfigError
from fedcross.deploy.keys import add_device_keys, check_name
from fedcross.engines.remote import host_and_port

#: File in ``deploy/templates`` -> its name in the bundle.
TEMPLATES = {
    "docker-compose.yml": "docker-compose.yml",
    "env": ".env",
    "fedcross.service": "fedcross-{name}.service",
    "README.md": "README.md",
}


def make(folder: Path, authority: Path, name: str, address: str, partition: int, width: float | None = None) -> Path:
    """Make the bundle ``FOLDER/NAME`` and return the path of the device's public key in it.

    Parameters
    ----------
    folder : Path
        An existing folder.
    authority : Path
        The federation's ``ca.crt``.
    name : str
        Lower-case letters, digits and inner hyphens.
    address : str
        ``host:port`` of the gateway as the device reaches it.
    partition : int
        The device's number in the federation, from 0.
    width : float, optional
        Share of a model's channels that the device can train; None: all.

    Raises
    ------
    ConfigError
        If the name, the address, the partition or the width is not valid.
    """
    check_name(name)
    host_and_port(address)
    if partition < 0:
        raise ConfigError(f"--partition {partition}: devices are numbered from 0.")
    if width is not None and not 0 < width <= 1:
        raise ConfigError(f"--width {width:g}: give a number above 0, up to 1.")
    bundle = folder / name
    for part in ("data", "state", "own"):
        (bundle / part).mkdir(parents=True, mode=0o700)
    add_device_keys(authority, bundle / "keys", name, partition)
    values = {
        "name": name,
        "address": address,
        "partition": str(partition),
        "width": "" if width is None else f" --width={width:g}",
    }
    for template, target in TEMPLATES.items():
        text = (files("fedcross.deploy") / "templates" / template).read_text(encoding="utf-8")
        path = bundle / target.format(name=name)
        path.write_text(Template(text).substitute(values), encoding="utf-8")
        path.chmod(0o644)
    return bundle / "keys" / f"{name}-node.pub"


def write_tar(folder: Path, file: IO[bytes]) -> None:
    """Write what is in `folder` to `file` as a compressed tar archive, without owners."""

    def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:gz") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name, filter=without_owner)
        whole.seek(0, os.SEEK_SET)
        file.write(whole.read())
