"""Makes all missing keys and certificates of one federation, in one folder, and renews those that expire soon.

::

    ROOT/authority    ca.crt ca.key             secret; in a real deployment, keep it on another machine
    ROOT/server       ca.crt server.crt server.key gateway.token      the last tells the SuperLink who is the gateway
    ROOT/superexec    ca.crt superexec.key      the secret with which the SuperExec signs its requests
    ROOT/public       ca.crt *-node.pub         keys that may be registered
    ROOT/page         ca.crt token              what opens the live page and /metrics at the gateway
    ROOT/operator     ca.crt token              what the SuperLink's control interface asks for
    ROOT/DEVICE       ca.crt DEVICE-node.key superexec.key    a folder for each device, mounted only into its container

Running it again changes no valid file. Of several processes one works at a time, and the next one finds what it made.
A copy of the authority's certificate without the authority itself is refused, and an
authority that is not the one of the copies: a new authority would lock out every device.
"""

from __future__ import annotations

import contextlib
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.links import resolved
from fedcross.core.private_files import (
    alone,
    check_place,
    check_private,
    check_readable,
    present_folder,
    private_folder,
    write_private,
    write_public,
)
from fedcross.core.replacing import tidy
from fedcross.core.trust import certificates, lasting, signing
from fedcross.core.trust.keys import SECRET, KeyPair, check_name, make_node_key, public_line
from fedcross.deploy import authorities, tokens
from fedcross.engines.executor import operators

#: A certificate that expires sooner is replaced when the federation starts.
RENEW = timedelta(days=30)
#: Names by which the parts of the compose federation reach each other.
INNER_NAMES = ("superlink", "gateway")
#: Folder and file of the live page's token, as text.
PAGE, TOKEN = operators.FOLDERS[operators.PAGE], operators.TOKEN
#: Folder of the token for the control interface, in a file of the same name.
OPERATOR = operators.FOLDERS[operators.VARIABLE]
GATEWAY = tokens.GATEWAY
OWN = ("authority", "server", "superexec", "public", PAGE, OPERATOR)


def prepare(root: Path, devices: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """Make all missing files below `root` and return the path of each file that was written.

    The public key of each device whose folder is there is copied into ``public`` again if it was replaced, named in
    `devices` or not.

    Parameters
    ----------
    root : Path
        The folder described above.
    devices : sequence of str
        Names of the devices that get a key here.
    names : sequence of str
        Further host names and addresses of the gateway. The certificate that is replaced gives its own too.

    Raises
    ------
    StorageError
        If a certificate has expired or lacks a name and the authority's key is not in the folder to sign a new one (one
        that only expires soon is told of on stderr), if the authority's certificate is not in its folder but in
        another, has expired or is not that of the copies, if the names in the server's certificate or the private key
        of a device are lost, a certificate is not valid yet by this clock, a link of another user, but root's, is in
        the place of a folder or on the way to it, or a file is not what it should be. The message names what was made
        before that.
    ConfigError
        If a name is none, or a device's is that of one of the federation's own folders.
    """
    names = [signing.check_host(name) for name in names]
    for device in devices:
        check_name(device)
    if taken := sorted({*OWN} & {*devices}):
        raise ConfigError(f"device {taken[0]}: a folder of the federation has this name. Choose another one.")
    made: list[str] = []
    for folder in (root, *(root / name for name in (*OWN, *devices))):
        resolved(folder)
    check_place(root)
    try:
        with alone(present_folder(root)):
            _prepare(root, devices, names, made)
    except StorageError as error:
        if not made:
            raise
        raise StorageError("\n".join([str(error), "Made before that:", *made])) from error
    return made


def _prepare(root: Path, devices: Sequence[str], names: Sequence[str], made: list[str]) -> None:
    """Do the work of :func:`prepare`; add each file to `made` as soon as it is there."""
    copies = sorted(root.glob("*/ca.crt")) + sorted(root.glob("*/keys/ca.crt"))
    authority = root / "authority" / "ca.crt"
    authorities.refuse_successor(authority, copies, root / "server" / "server.crt")
    authorities.refuse_other(authority, [root / name / "ca.crt" for name in (*OWN[1:], *devices)])
    authorities.refuse_superseded(authority, root / "server" / "server.crt")
    for device in devices:
        _refuse_lost(root / device, root / "public", device)
    folders = {name: private_folder(root / name) for name in (*OWN, *devices)}
    for folder in root.glob("*/"):
        tidy(folder)
    with alone(folders["authority"]):  # in containers this folder is shared, and the one above is each one's own
        _fill(folders, devices, names, made)
        _refresh(root, devices, made)


def _fill(folders: Mapping[str, Path], devices: Sequence[str], names: Sequence[str], made: list[str]) -> None:
    authority = KeyPair(folders["authority"] / "ca.crt", folders["authority"] / "ca.key")
    if not authority.public.exists():
        made += _files(signing.new_authority(folders["authority"]))
    certificates.check_authority(authority)
    text = certificates.authority_text(authority.public)
    authorities.warn_of_end(authority.public)
    copies = (folders[name] / "ca.crt" for name in OWN if name not in ("authority", "server"))
    _server(authority, folders["server"], names, next((copy for copy in copies if copy.exists()), None), made)
    made += gateway_token(folders["server"])
    _secret(folders["superexec"] / SECRET, made)
    _token(folders[PAGE] / TOKEN, made, operators.PAGE_SHORTEST)
    _token(folders[OPERATOR] / TOKEN, made)
    for device in devices:
        _device(folders[device], folders["public"], device, made)
    for name, folder in folders.items():
        if name != "authority":
            _public(folder / "ca.crt", text, made)


def _files(pair: KeyPair) -> list[str]:
    return [str(pair.public), str(pair.private)]


def _public(path: Path, content: bytes, made: list[str]) -> None:
    """Write a file for everybody to read, unless it is there and so."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content and stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR == 0o644:
            return
    write_public(path, content)
    made.append(str(path))


def _server(authority: KeyPair, folder: Path, names: Sequence[str], copy: Path | None, made: list[str]) -> None:
    """Make or renew the server's certificate; one with another's key, without a name or of another authority too.

    `copy` is a file that the federation had made by the end of an earlier call, after the server's certificate.
    """
    pair = KeyPair(folder / "server.crt", folder / "server.key")
    earlier = _earlier_names(pair, bool(names), copy)
    if earlier:
        certificates.check_begun(pair.public)  # one that a slow clock takes for a bad one is good
    wanted = [*INNER_NAMES, *names, *sorted(earlier)]
    if set(wanted) <= earlier and (_good(pair, authority.public) or _kept(pair, authority, wanted)):
        return
    try:
        made += _files(signing.make_server(authority, folder, wanted))
    except StorageError as error:
        raise StorageError(f"{pair.public}: {_why(pair, wanted, earlier, authority.public)}. {error}") from error


def _why(pair: KeyPair, wanted: Sequence[str], earlier: set[str], authority: Path) -> str:
    """Return why a server's certificate is to be signed."""
    if not pair.public.exists():
        return "it is to be made"
    if new := sorted(set(wanted) - earlier):
        return f"it lacks the name {new[0]}, so it is to be signed anew"
    if not pair.private.exists():
        return f"{pair.private.name} is lost, so it is to be signed anew with a new key"
    try:
        left = certificates.check_certificate(pair.public, authority)
    except StorageError:
        return "it is not good any more, so it is to be signed anew"
    return f"{left.days} days left, so it is to be signed anew"


def _earlier_names(pair: KeyPair, given: bool, copy: Path | None) -> set[str]:
    """Return the names in the server's certificate: a new one keeps them. If it is lost, they must be `given`."""
    for path in pair.public, pair.private:
        if path.exists():
            check_readable(path)
    lost = (
        "So the names in it are lost: bring it back, or give all with --names (--names localhost if there were none "
        "but the usual ones)."
    )
    if not pair.public.exists() and not pair.private.exists():
        if copy is None or given:
            return set()
        raise StorageError(f"{pair.public}: missing, though {copy} is of a federation that had one. {lost}")
    try:
        return certificates.server_names(pair.public, lost)
    except StorageError:
        if given:
            return set()
        raise


def _good(pair: KeyPair, authority: Path) -> bool:
    """Return whether the pair can stay: it is one, of this authority, and lasts, or cannot last longer."""
    if not pair.private.exists():
        return False
    check_private(pair.private)
    try:
        certificates.check_key(pair.private)
        left = certificates.check_certificate(pair.public, authority)
    except StorageError:
        return False
    return left > RENEW or lasting.ends_with(pair.public, authority)


def _kept(pair: KeyPair, authority: KeyPair, names: Sequence[str]) -> bool:
    """Return whether the pair must stay, since nothing can be signed, and can, as it is valid still; say so."""
    if authority.private.exists() or not pair.private.exists():
        return False
    try:
        certificates.check_key(pair.private)
        left = certificates.check_certificate(pair.public, authority.public)
    except StorageError:
        return False
    usual = {*INNER_NAMES, *signing.LOOPBACK}  # that command adds them
    given = [name for name in dict.fromkeys(names) if name not in usual] or ["localhost"]
    print(
        f"{pair.public}: {left.days} days left, and {authority.private} is not here to sign a new one. Bring that here "
        f"and call this again; or, on the machine where it is: fedcross deploy server AUTHORITY FOLDER "
        f"{' '.join(given)}, and put server.crt and server.key of FOLDER into {pair.public.parent}",
        file=sys.stderr,
    )
    return True


def _secret(path: Path, made: list[str]) -> None:
    if path.exists():
        certificates.check_key(path)
        return
    make_secret(path)
    made.append(str(path))


def _token(path: Path, made: list[str], shortest: int = operators.SHORTEST) -> None:
    if path.exists():
        tokens.check(path, shortest)
        return
    tokens.make(path)
    made.append(str(path))


def gateway_token(folder: Path) -> list[str]:
    """Make the gateway's token in the folder of the server's keys if it is missing; return the path of a new one."""
    made: list[str] = []
    _token(folder / GATEWAY, made)
    return made


def authority_copy(authority: Path, folder: Path) -> list[str]:
    """Put the certificate `authority` into `folder` as ``ca.crt``, unless it is there; return the path of a new one."""
    made: list[str] = []
    if not (folder / "ca.crt").exists():
        _public(folder / "ca.crt", certificates.authority_text(authority), made)
    return made


def make_secret(path: Path) -> None:
    """Write a new secret, with which a SuperExec signs its requests to the SuperLink or SuperNode that has it too."""
    write_private(path, secrets.token_bytes(32))


def _refuse_lost(folder: Path, public: Path, name: str) -> None:
    """Raise StorageError if a device had a key of which only the public one, to be registered, is left."""
    pair = KeyPair(folder / f"{name}-node.pub", folder / f"{name}-node.key")
    copy = public / pair.public.name
    if copy.exists() and not pair.private.exists() and not pair.public.exists():
        raise StorageError(
            f"{copy}: this device had a key, and {pair.private} is away. Bring that back. If it is lost, revoke this "
            "key, move this file away and run this again."
        )


def _device(folder: Path, public: Path, name: str, made: list[str]) -> None:
    pair = KeyPair(folder / f"{name}-node.pub", folder / f"{name}-node.key")
    if pair.private.exists():
        certificates.check_key(pair.private)
    else:
        made += _files(make_node_key(folder, name))
    if not pair.public.exists():
        _public(pair.public, public_line(pair.private, name), made)
    _secret(folder / SECRET, made)
    _public(public / pair.public.name, pair.public.read_bytes(), made)


def _refresh(root: Path, devices: Sequence[str], made: list[str]) -> None:
    """Copy the public keys of the other devices whose folders are there, for one of them may have a new key."""
    for private in sorted(root.glob("*/*-node.key")):
        name = private.parent.name
        if private.name != f"{name}-node.key" or name in (*OWN, *devices):
            continue
        try:
            line = public_line(certificates.check_key(private), name)
        except StorageError as error:  # nobody asked for this device
            print(f"{error} So its public key is not copied.", file=sys.stderr)
            continue
        public = private.with_suffix(".pub")
        _public(root / "public" / public.name, public.read_bytes() if public.exists() else line, made)
