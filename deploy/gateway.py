"""The gateway on a machine without containers: HAProxy with the configuration of the compose federation.

``gateway.cfg`` and ``deadline.lua`` name the places of the container. :func:`prepare` writes copies of both with the
places of this machine; all limits stay as they are.
"""

from __future__ import annotations

import os
import shutil
import socket
from importlib.resources import files
from pathlib import Path

from fedcross.core.errors import StorageError, quoted
from fedcross.core.exposed import key_in
from fedcross.core.private_files import private_folder, write_private
from fedcross.core.trust import certificates
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy import tokens
from fedcross.deploy.federation import GATEWAY
from fedcross.engines.remote import host_and_port

CONFIG, DEADLINE, SOCKET, PAIR = "gateway.cfg", "deadline.lua", "gateway.sock", "server.pem"
#: Where the configuration takes the token from, in a container: ``gateway.sh`` reads it.
SAID = "${FEDCROSS_GATEWAY}"
#: Characters of a path that mean something in HAProxy's configuration or in its Lua file.
_MEANING = "#$'\"\\"
#: HAProxy resolves the container's name anew; an address or a name of this machine's is looked up once.
_RESOLVED = " resolvers docker init-addr last,libc,none"


def prepare(keys: Path, work: Path, superlink: str, listen: str) -> list[str]:
    """Write the gateway's files into `work`, private to this user, and return HAProxy's command.

    Parameters
    ----------
    keys : Path
        Folder with ``ca.crt``, ``server.crt``, ``server.key``, ``gateway.token``.
    work : Path
        Folder for the configuration, the certificate with its key, and the socket; a Unix socket's path has at most
        about 100 characters.
    superlink : str
        ``host:port`` of the SuperLink.
    listen : str
        ``host:port`` where devices come in, for example ``0.0.0.0:8443``.

    Raises
    ------
    StorageError
        If a certificate, key or token is missing, expired, of another pair or readable by others, HAProxy is missing,
        `work` is a folder of keys or of a gateway that runs, or a path has characters that HAProxy reads otherwise. No
        file is written then.
    ConfigError
        If an address has another form.
    """
    pair = KeyPair(keys / "server.crt", keys / "server.key")
    certificates.check_certificate(pair.public, keys / "ca.crt")
    certificates.check_key(pair.private)
    token = tokens.check(keys / GATEWAY)
    host_and_port(superlink)
    host_and_port(listen)
    haproxy = _haproxy()
    if (key := key_in(work)) is not None:
        raise StorageError(f"--work {work}: a folder of keys, with {key.name}. Name another, which may be new.")
    place, authority = private_folder(work).resolve(), (keys / "ca.crt").resolve()
    if _answers(place / SOCKET):
        raise StorageError(
            f"--work {work}: a gateway runs with it (fuser {quoted(place / SOCKET)} says which). Stop that one, or "
            "name another folder."
        )
    for path in (place, authority):
        if odd := sorted({one for one in str(path) if one in _MEANING or one.isspace() or not one.isprintable()}):
            raise StorageError(
                f"{path}: HAProxy's configuration takes no spaces in paths, and none of {' '.join(_MEANING)} (found: "
                f"{', '.join(map(repr, odd))}). Choose another folder."
            )
    write_private(place / PAIR, pair.public.read_bytes() + pair.private.read_bytes())
    write_private(place / DEADLINE, _changed(DEADLINE, {f"/tmp/{SOCKET}": str(place / SOCKET)}))  # noqa: S108
    config = _changed(
        CONFIG,
        {
            f"/tmp/{SOCKET}": str(place / SOCKET),  # noqa: S108 - the container's path, which is replaced
            f"/etc/fedcross/{DEADLINE}": str(place / DEADLINE),
            "bind :8443": f"bind {listen}",
            "/keys/server/server.crt": str(place / PAIR),
            "/keys/server/ca.crt": str(authority),
            "superlink:8000": superlink,
            SAID: token,
            _RESOLVED: "",
        },
    )
    write_private(place / CONFIG, config)
    return [haproxy, "-W", "-db", "-f", str(place / CONFIG)]


def _answers(place: Path) -> bool:
    """Return whether a program listens at the Unix socket `place`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        try:
            own.connect(str(place))
        except OSError:
            return False
    return True


def _haproxy() -> str:
    """Return HAProxy's path; Debian puts it where an ordinary user's PATH does not lead."""
    found = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if found is None:
        raise StorageError("haproxy: not found. Install version 2.4 or newer with Lua, as Debian's package haproxy is.")
    return found


def _changed(name: str, places: dict[str, str]) -> bytes:
    """Return the file `name` of this package with every key of `places` replaced by its value."""
    text = (files("fedcross.deploy") / name).read_text(encoding="utf-8")
    for before, now in places.items():
        if before not in text:
            raise StorageError(f"{name}: it does not name {before}. Install fedcross again.")
        text = text.replace(before, now)
    return text.encode()
