"""Which device a bundle is of: its folder may have been renamed, copied or mounted under another name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import resolved
from fedcross.core.plain_files import read_plain
from fedcross.core.private_files import check_place
from fedcross.deploy.federation import OWN

_NAMED = re.compile(r"(?<![\w-])--name[= ]([A-Za-z0-9-]+)")
_ENDINGS = ("-node.key", "-node.pub")


def locate(bundle: Path) -> tuple[Path, str]:
    """Return the folder of a device's keys and the device's name.

    The folder is ``keys`` in what :func:`deploy.device.new_client` made, and of a federation's own device `bundle`
    itself. The name is that under which the bundle starts the device, else that of its key's files. The name of the
    folder counts where neither tells.

    Both are without links: no link of another user, but root's, is followed (:func:`core.links.resolved`).

    Raises
    ------
    StorageError
        If it is neither kind of folder, whose keys are in it cannot be told, a link of another user leads there, or its
        folder ``keys`` has another owner.
    """
    bundle = resolved(bundle)
    if bundle.name == "keys" and bundle.name not in held(bundle) and (bundle.parent / "docker-compose.yml").exists():
        raise StorageError(
            f"{bundle}: the keys of a bundle. Name the folder that new-client made, above it: {quoted(bundle.parent)}"
        )
    keys = resolved(bundle / "keys")
    _refuse_others(bundle, keys)
    if bundle.name in held(bundle):
        return bundle, bundle.name
    names, started = held(keys), started_as(bundle)
    if names:
        return keys, _of_several(keys, names, started or (bundle.name if bundle.name in names else None))
    if started is not None or any(bundle.glob("fedcross-*.service")) or (keys / "ca.crt").exists():
        return keys, started or bundle.name
    if (bundle / "ca.crt").exists() and bundle.name not in ("keys", *OWN):
        raise StorageError(
            f"{bundle}: no {bundle.name}-node.key and no {bundle.name}-node.pub in it. Bring them back, or see what "
            f"fedcross deploy federation {quoted(bundle.parent)} --device {quoted(bundle.name)} says."
        )
    raise StorageError(
        f"{keys}: no *-node.key in it, and no files of a bundle beside it. Name the folder that new-client made. If "
        "new-client was cut off, remove what it has left and call it again."
    )


def _refuse_others(bundle: Path, keys: Path) -> None:
    """Raise StorageError if a bundle's folder of keys belongs to another user than the bundle, unless that is root's.

    Who owns the bundle can put any folder, a link of root's among them, in the place of `keys`.
    """
    if not keys.exists():
        return
    owner, whose = keys.stat().st_uid, check_place(bundle).stat().st_uid
    if whose in (0, owner):
        return
    raise StorageError(
        f"{keys}: user {owner} owns it, and user {whose} the bundle {bundle}, who could lead what is written there to "
        f"another device's keys. If it is this device's, give both to one user: chown -R USER {quoted(bundle)} "
        f"{quoted(keys)}"
    )


def _of_several(keys: Path, names: Sequence[str], started: str | None) -> str:
    """Return which of the devices with keys here is the bundle's: `started`, or the only one if that is not known."""
    if started in names:
        return str(started)
    if started is None and len(names) == 1:
        return names[0]
    if started is None:
        raise StorageError(f"{keys}: keys of {' and '.join(names)}, and a device has one. Move the others' files away.")
    moves = [f"mv {quoted(keys / f'{names[0]}{end}')} {quoted(keys / f'{started}{end}')}" for end in _ENDINGS]
    raise StorageError(
        f"{keys}: keys of {' and '.join(names)}, but the bundle starts the device as {started}, which reads "
        f"{started}-node.key. If they are this device's, give them their name: {' && '.join(moves)}\n"
        "Else move them away."
    )


def held(folder: Path) -> list[str]:
    """Return the names of the devices with a key, private or public, in `folder`."""
    names = (file.name.removesuffix(end) for end in _ENDINGS for file in folder.glob(f"*{end}") if file.is_file())
    return sorted(set(names))


def started_as(bundle: Path) -> str | None:
    """Return the one name under which a bundle's compose file and unit start the device; None if they tell no one."""
    found: set[str] = set()
    for file in (bundle / "docker-compose.yml", *bundle.glob("fedcross-*.service")):
        with contextlib.suppress(OSError, StorageError):
            lines = read_plain(file).decode(errors="replace").splitlines()
            found |= {name for line in lines if not line.lstrip().startswith("#") for name in _NAMED.findall(line)}
    return found.pop() if len(found) == 1 else None


def refuse_remains(keys: Path) -> None:
    """Raise StorageError if `keys`, which shall get a first key, has files that may be the earlier one."""
    if remains := sorted(file.name for file in keys.glob("*-node.*")):
        raise StorageError(
            f"{keys / remains[0]}: perhaps the device's key. If it is, give it the name NAME-node.key (or .pub) again; "
            "else move it away."
        )
