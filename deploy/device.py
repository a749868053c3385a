"""The bundle of a new edge device: one folder with all files for the device, and the command that registers it.

::

    NAME/keys/ca.crt  NAME-node.key  NAME-node.pub     the key never leaves the device; the .pub goes to the server
    NAME/keys/superexec.key                            secret that only this device's own processes share
    NAME/data/        its own examples
    NAME/own/         methods, models and tasks of the user's own (FEDCROSS_PATH)
    NAME/state/       what Flower and the methods keep between rounds
    NAME/docker-compose.yml  NAME/.env                 to run it in a container ...
    NAME/fedcross-NAME.service                         ... or as a systemd service
    NAME/README.md
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.links import opened, refuse_link, resolved
from fedcross.core.plain_files import read_plain
from fedcross.core.private_files import alone, check_place, give, make_folder, private_folder, write_public
from fedcross.core.replacing import tidy
from fedcross.core.trust import certificates, signing
from fedcross.core.trust.admission import check_partition
from fedcross.core.trust.keys import (
    LEAST_SECRET,
    SECRET,
    KeyPair,
    check_name,
    make_node_key,
    public_line,
    read_public_key,
)
from fedcross.deploy.bundle import held, locate, refuse_remains
from fedcross.deploy.federation import make_secret
from fedcross.deploy.start import check_width
from fedcross.engines.remote import host_and_port

#: File in ``deploy/templates`` -> its name in the bundle.
TEMPLATES = {
    "docker-compose.yml": "docker-compose.yml",
    "env": ".env",
    "fedcross.service": "fedcross-{name}.service",
    "README.md": "README.md",
}


@dataclass(frozen=True)
class Device:
    """The properties of one device.

    Attributes
    ----------
    name : str
        Letters, digits and inner hyphens.
    superlink : str
        ``host:port`` of the gateway as the device reaches it.
    partition, partitions : int
        Number of the device in the federation, from 0, and the number of devices.
    width : float, optional
        Share of a model's channels that the device can train; default: all.
    """

    name: str
    superlink: str
    partition: int
    partitions: int
    width: float | None = None


def new_client(device: Device, authority: Path, folder: Path) -> Path:
    """Make the bundle ``FOLDER/NAME`` and return it.

    Parameters
    ----------
    device : Device
        The device.
    authority : Path
        The federation's ``ca.crt``.
    folder : Path
        Folder in which the bundle is made; no link of another user, but root's, leads there.

    Raises
    ------
    ConfigError
        If the name, the address, the number or the width is not valid.
    StorageError
        If the bundle exists, a link of another user leads there, or a file cannot be read or written.
    """
    check_name(device.name)
    _check_address(device.superlink)
    if not 0 <= device.partition < device.partitions:
        raise ConfigError(
            f"partition={device.partition}: devices are numbered 0 to {device.partitions - 1}, one number each."
        )
    check_partition(device.partition)
    check_width(device.width)
    text = certificates.authority_text(authority)
    certificates.validity(authority)
    bundle = check_place(resolved(folder)) / device.name
    try:
        make_folder(bundle)
    except FileExistsError as error:
        raise StorageError(
            f"{bundle}: exists already. Use fedcross deploy rotate-key to replace its key, or remove the folder if "
            "it was left half made."
        ) from error
    except OSError as error:
        raise StorageError(f"{bundle}: this folder cannot be made ({error.strerror}). Choose another one.") from error
    try:
        _fill(bundle, device, text)
    except BaseException:  # a half bundle would be in the way of the next try
        shutil.rmtree(bundle, ignore_errors=True)
        raise
    return bundle


def _check_address(address: str) -> None:
    """Refuse what a server's certificate cannot name: the address stands in files that a shell and systemd read."""
    host, port = host_and_port(address)
    signing.check_host(host.strip("[]"))
    if port == 0:
        raise ConfigError(f"--superlink {address}: there is no port 0.")


def _fill(bundle: Path, device: Device, authority: bytes) -> None:
    keys = private_folder(bundle / "keys")
    for name in ("data", "state", "own"):
        private_folder(bundle / name)
    make_node_key(keys, device.name)
    make_secret(keys / SECRET)
    write_public(keys / "ca.crt", authority)
    values = {
        "name": device.name,
        "superlink": device.superlink,
        "partition": str(device.partition),
        "partitions": str(device.partitions),
        "last": str(device.partitions - 1),
        "register": registration(device),
        "width_line": "" if device.width is None else f"      - --width={device.width:g}\n",
        "width_option": "" if device.width is None else f" --width={device.width:g}",
    }
    for template, target in TEMPLATES.items():
        text = (files("fedcross.deploy") / "templates" / template).read_text(encoding="utf-8")
        write_public(bundle / target.format(name=device.name), Template(text).substitute(values).encode())


def registration(device: Device) -> str:
    """Return the command that registers a device for its partition, on the machine of the compose federation."""
    return f"docker compose run --rm -T admin register --partition {device.partition} - < {device.name}-node.pub"


class Rotation(NamedTuple):
    """Paths of the new public key, of the old one, and of another one that the .pub file had beside the old key."""

    new: Path
    old: Path
    other: Path | None


def rotate_key(bundle: Path) -> Rotation:
    """Give a device a new key and return the paths of the new and of the old public key.

    `bundle` is what :func:`new_client` made, or a device's folder of :func:`deploy.federation.prepare`. The SuperLink
    refuses the device until the new key is registered. The old key must be revoked first, because a partition belongs
    to one key. The old public key is the private key's own, whatever the .pub file says; if that file holds another
    one, it is kept first, because either may be the registered one, and the other one another device's. If the private
    key is lost, the .pub file has the old one. The new files have the owner of the old key, whoever runs this. Public
    keys that were replaced earlier stay: one of them may be the registered one. Of several processes one rotates at a
    time. A secret that is missing or too short is made anew. A bundle that has lost both key files gets new ones, and
    the second path is of no file.

    Root does this for a device's user, who owns the folders: no link of that user is followed, and no file of it that
    this call has not written is given away.

    Raises
    ------
    StorageError
        If it is neither kind of folder, a folder is another user's link or has another owner than the bundle, the key
        is a link or cannot be told from others', or a file cannot be read or written.
    """
    keys, name = locate(bundle)
    refuse_link(keys / f"{name}-node.key")
    with alone(private_folder(keys)):
        _refuse_moved(bundle, keys)
        with opened(keys) as place:
            pair = KeyPair(place / f"{name}-node.pub", place / f"{name}-node.key")
            tidy(place)
            done = _rotate(pair) if name in held(place) else _first(pair, bundle)
    other = None if done.other is None else keys / done.other.name
    return Rotation(keys / done.new.name, keys / done.old.name, other)


def new_secret(bundle: Path) -> Path:
    """Give a device a new ``superexec.key`` and return its path; its identity, the key, stays.

    `bundle` is one that :func:`rotate_key` takes. Its processes must be started again, since both ends use the secret.
    """
    keys, name = locate(bundle)
    private = private_folder(keys) / f"{name}-node.key"
    if not private.exists():
        raise StorageError(f"{private}: missing. fedcross deploy rotate-key without --secret makes both anew.")
    with alone(keys):
        _refuse_moved(bundle, keys)
        with opened(keys) as place:
            _secret(place / SECRET, (place / private.name).lstat())
    return keys / SECRET


def _refuse_moved(bundle: Path, keys: Path) -> None:
    """Raise StorageError if another folder lies in the place of `keys` since :func:`deploy.bundle.locate` looked."""
    if (now := locate(bundle)[0]) != keys:
        raise StorageError(f"{keys}: {now} is in its place since this call began. Who moved it? Then call this again.")


def _first(pair: KeyPair, bundle: Path) -> Rotation:
    """Make the key of a bundle that has lost both files of its pair."""
    keys, name = pair.private.parent, _name(pair)
    owner = bundle.stat() if bundle.stat().st_uid else keys.stat()  # in root's bundle the keys may be a service's
    refuse_remains(keys)
    make_node_key(keys, name)
    if not _is_secret(keys / SECRET):
        _secret(keys / SECRET, owner)
    for path in (pair.private, pair.public):
        give(path, owner)
    return Rotation(pair.public, _old(keys, name, None), None)


def _secret(path: Path, owner: os.stat_result) -> None:
    make_secret(path)
    give(path, owner)


def _is_secret(path: Path) -> bool:
    return path.is_file() and path.stat().st_size >= LEAST_SECRET


def _rotate(pair: KeyPair) -> Rotation:
    name, keys, before = _name(pair), pair.private.parent, _content(pair.private)
    owner = (pair.private if before is not None else pair.public).lstat()
    line = _own_line(pair, name)
    if not _is_secret(keys / SECRET):  # lost, or a bundle of version 0.2 or older
        _secret(keys / SECRET, owner)
    kept_other = None
    if (other := _other(pair.public, line)) is not None:
        kept_other = _old(keys, name, other)
        write_public(kept_other, other)
    old = _old(keys, name, line)
    kept = old.exists()
    write_public(old, line)
    try:
        make_node_key(keys, name, True)
    except BaseException:
        if not kept and _content(pair.private) == before:
            old.unlink()  # the key is the valid one still
        raise
    for path in (pair.private, pair.public, old, *([] if kept_other is None else [kept_other])):
        give(path, owner)
    return Rotation(pair.public, old, kept_other)


def _name(pair: KeyPair) -> str:
    return pair.private.stem.removesuffix("-node")


def _content(path: Path) -> bytes | None:
    """Return a file's content; None if it is away."""
    try:
        return read_plain(path) if path.exists() else None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}). Move it away, or run as its owner.") from error


def _other(public: Path, line: bytes) -> bytes | None:
    """Return the content of a .pub file that holds another key than `line`; None if it is the same, damaged or away."""
    content = _content(public)
    if content is None:
        return None
    try:
        read_public_key(public)
    except StorageError:
        return None
    return None if content.split()[:2] == line.split()[:2] else content


def _own_line(pair: KeyPair, name: str) -> bytes:
    """Return the public key of a pair: the private key's own, or the .pub file's if that key is damaged or away."""
    try:
        return public_line(pair.private, name)
    except StorageError:
        if not pair.public.is_file():
            raise
        try:
            read_public_key(pair.public)
        except StorageError as error:
            raise StorageError(
                f"{error} The private key is damaged or away too. Remove both files and call this again: then the old "
                "key is revoked by its number."
            ) from error
        return pair.public.read_bytes()


def _old(keys: Path, name: str, key: bytes | None) -> Path:
    """Return the file for a public key that is replaced: the first that is free, or that has this key already."""
    path, number = keys / f"{name}-node-old.pub", 1
    while _content(path) not in (None, key):
        number += 1
        path = keys / f"{name}-node-old-{number}.pub"
    return path
