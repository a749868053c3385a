"""Makes all missing keys and certificates of one federation, in one folder, and renews those that expire soon.

::

    ROOT/authority    ca.crt ca.key             secret; in a real deployment, keep it on another machine
    ROOT/server       ca.crt server.crt server.key gateway.token      the last tells the SuperLink who is the gateway
    ROOT/superexec    ca.crt superexec.key      the secret with which the SuperExec signs its requests
    ROOT/public       ca.crt *-node.pub         keys that may be registered
    ROOT/page         ca.crt token              what opens the live page and /metrics at the gateway
    ROOT/operator     ca.crt token              what the SuperLink's control interface asks for
    ROOT/DEVICE       ca.crt DEVICE-node.key superexec.key    a folder for each device, mounted only into its container

Running it again changes no valid file.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from fedcross.core import keys as certificates
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.keys import KeyPair
from fedcross.core.private_files import check_private, private_folder, write_private, write_public

#: A certificate that expires sooner is replaced when the federation starts.
RENEW = timedelta(days=30)
#: Names by which the parts of the compose federation reach each other.
INNER_NAMES = ("superlink", "gateway")
SECRET = "superexec.key"  # noqa: S105 - a file name
#: Folder and file of the live page's token, as text.
PAGE, TOKEN = "page", "token"
#: Folder of the token for the control interface, in a file of the same name.
OPERATOR = "operator"
#: The gateway's token, beside the server's key.
GATEWAY = "gateway.token"
OWN = ("authority", "server", "superexec", "public", PAGE, OPERATOR)


def prepare(root: Path, devices: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """Make all missing files below `root` and return one line per new file.

    Parameters
    ----------
    root : Path
        The folder described above.
    devices : sequence of str
        Names of the devices that get a key here.
    names : sequence of str
        Further host names and addresses of the gateway.

    Raises
    ------
    StorageError
        If a certificate expires soon and the authority's key is not in the folder to sign a new one.
    ConfigError
        If a device's name is none, or is that of one of the federation's own folders.
    """
    for device in devices:
        certificates.check_name(device)
    if taken := sorted({*OWN} & {*devices}):
        raise ConfigError(f"device {taken[0]}: a folder of the federation has this name. Choose another one.")
    made: list[str] = []
    folders = {name: private_folder(root / name) for name in (*OWN, *devices)}
    authority = KeyPair(folders["authority"] / "ca.crt", folders["authority"] / "ca.key")
    if not authority.public.exists():
        certificates.make_authority(folders["authority"])
        made.append(str(authority.public))
    _server(authority, folders["server"], names, made)
    made += gateway_token(folders["server"])
    _secret(folders["superexec"] / SECRET, made)
    _token(folders[PAGE] / TOKEN, made)
    _token(folders[OPERATOR] / TOKEN, made)
    for device in devices:
        _device(folders[device], folders["public"], device, made)
    for name, folder in folders.items():
        if name != "authority":
            write_public(folder / "ca.crt", authority.public.read_bytes())
    return made


def _server(authority: KeyPair, folder: Path, names: Sequence[str], made: list[str]) -> None:
    """Make or renew the server's certificate; one with another's key, without a name or of another authority too."""
    pair = KeyPair(folder / "server.crt", folder / "server.key")
    wanted = [*INNER_NAMES, *names]
    if pair.public.exists() and pair.private.exists():
        check_private(pair.private)
        try:
            certificates.check_key(pair.private)
            left = certificates.check_certificate(pair.public, authority.public)
        except StorageError:
            left = timedelta(0)
        if left > RENEW and set(wanted) <= certificates.server_names(pair.public):
            return
    certificates.make_server(authority, folder, wanted)
    made.append(str(pair.public))


def _secret(path: Path, made: list[str]) -> None:
    if path.exists():
        check_private(path)
        return
    make_secret(path)
    made.append(str(path))


def _token(path: Path, made: list[str]) -> None:
    if path.exists():
        check_private(path)
        return
    write_private(path, secrets.token_urlsafe(32).encode())
    made.append(str(path))


def gateway_token(folder: Path) -> list[str]:
    """Make the gateway's token in the folder of the server's keys if it is missing; return the path of a new one."""
    made: list[str] = []
    _token(folder / GATEWAY, made)
    return made


def make_secret(path: Path) -> None:
    """Write a new secret, with which a SuperExec signs its requests to the SuperLink or SuperNode that has it too."""
    write_private(path, secrets.token_bytes(32))


def _device(folder: Path, public: Path, name: str, made: list[str]) -> None:
    pair = KeyPair(folder / f"{name}-node.pub", folder / f"{name}-node.key")
    if pair.private.exists():
        check_private(pair.private)
    else:
        certificates.make_node_key(folder, name)
        made.append(str(pair.private))
    _secret(folder / SECRET, made)
    write_public(public / pair.public.name, pair.public.read_bytes())
