"""Checks of ``fedcross doctor --keys``: a folder of keys and certificates, of the server or of the authority."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import dangling
from fedcross.server.commands.findings import Finding, fault, note, ok

#: With this much time left, a certificate can be rotated in working hours.
SOON = timedelta(days=7)


def check_keys(folder: Path, authority: Path | None, folders: Sequence[Path] = ()) -> Iterator[Finding]:
    """Check modes of keys, signatures and dates of certificates in `folder`, that pairs are whole and belong together.

    The authority is the one that is named, else that of the folder, else the one of `folders` that has signed here.

    Raises
    ------
    PermissionError
        If this user may not look into the folder.
    """
    if not folder.is_dir():
        yield fault(f"{folder}: no such folder. {_first(folder)}")
        return
    from fedcross.core.trust.issued import FILE

    files = sorted(folder.iterdir())
    certificates = [path for path in files if path.suffix == ".crt"]
    keys = [path for path in files if path.suffix == ".key"]
    if not certificates and not keys:
        if parts := [str(path) for path in files if path.is_dir() and any(path.glob("*.crt"))]:
            named = " ".join(map(quoted, parts))
            yield fault(f"{folder}: the keys are in its folders. Name those: fedcross doctor --keys {named}")
            return
        if not _lacks_root(folder, files):  # then it is told
            yield fault(f"{folder}: no .crt and no .key in this folder. {_first(folder)}")
    yield from _missing(folder, files)
    root = authority or _signer(certificates, folders) or folder / "ca.crt"
    if certificates and not root.exists():
        if not _lacks_root(folder, files):
            away = dangling(root)
            yield fault(
                f"{away} Is its disk mounted?"
                if away
                else f"{root}: no such file. Name the authority's certificate with --authority."
            )
        certificates = []
    lists = [path for path in files if path.suffix == ".crl" or path.name.endswith("token") or path.name == FILE]
    told: set[str] = set()
    for path in [folder, *keys, *certificates, *lists]:
        try:
            yield _of_folder(folder) if path == folder else _of_file(path, root)
        except StorageError as error:
            if str(error) not in told:  # what is wrong with the authority's files is so for each certificate
                yield fault(str(error))
            told.add(str(error))


def _signer(certificates: Sequence[Path], folders: Sequence[Path]) -> Path | None:
    """Return the ``ca.crt`` in one of `folders` that has signed one of `certificates`, if these have none beside."""
    from fedcross.core.trust.certificates import read_authority, read_certificate, signed

    if any(path.name == "ca.crt" for path in certificates):
        return None
    for root in (folder / "ca.crt" for folder in folders):
        for path in certificates:
            with suppress(StorageError):  # one that cannot be read is told of by itself
                if signed(read_certificate(path), read_authority(root)):
                    return root
    return None


def _first(folder: Path) -> str:
    """Return what to do about a folder without keys: none are made where others show that there were some."""
    copies = [path for path in sorted(folder.parent.glob("*/ca.crt")) if path.parent != folder]
    if not copies:
        return "Make keys with fedcross deploy federation."
    from fedcross.deploy.authorities import not_expired

    if folder.name == "authority" and not_expired(copies):
        return (
            f"Bring it back, or put the copy {copies[0]} into it (nothing can be signed then). A new authority locks "
            "out all devices."
        )
    device = (
        f" --device {quoted(folder.name)}" if (folder.parent / "public" / f"{folder.name}-node.pub").exists() else ""
    )
    return f"Bring it back. If it is lost, see what fedcross deploy federation {quoted(folder.parent)}{device} says."


def check_one_authority(folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that each ``ca.crt`` in `folders` that can be read is the same authority's."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from fedcross.core.trust.certificates import read_authority

    found: dict[bytes, list[Path]] = {}
    for path in (folder / "ca.crt" for folder in folders):
        with suppress(StorageError):
            if path.exists():
                key = read_authority(path).public_key()
                found.setdefault(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), []).append(path)
    most, *others = sorted(found.values(), key=len, reverse=True) or [[]]
    for path in (path for paths in others for path in paths):
        yield fault(f"{path}: of another authority than {most[0]}. {_put_right(path, most[0])}")
    yield from _earlier_lists(folders)


def _put_right(copy: Path, good: Path) -> str:
    """Return what puts a ``ca.crt`` right that is of another authority than most."""
    from fedcross.deploy.federation import OWN

    name, root = copy.parent.resolve().name, quoted(copy.parent.parent)
    if name in OWN:
        return f"fedcross deploy federation {root} puts it right, or says how."
    if (copy.parent / f"{name}-node.key").exists():  # a federation's own device, which that command sees if it is named
        return f"fedcross deploy federation {root} --device {quoted(name)} puts it right, or says how."
    return f"If that is the federation's: cp {quoted(good)} {quoted(copy)}"


def _earlier_lists(folders: Sequence[Path]) -> Iterator[Finding]:
    """Tell of lists of revoked certificates that are earlier than another in `folders`, the gateway's perhaps."""
    from fedcross.core.trust.revoked import LIST, refuse_earlier

    lists = [folder / LIST for folder in folders if (folder / LIST).is_file()]
    for path in lists:
        try:
            with suppress(OSError, ValueError):  # one that is no list is told of by itself
                refuse_earlier(path, [one for one in lists if one != path])
        except StorageError as error:
            yield fault(str(error))


def _lacks_root(folder: Path, files: Sequence[Path]) -> bool:
    """Return whether this is a folder of a federation whose programs need a ``ca.crt`` that is not in it."""
    from fedcross.deploy.federation import OWN

    own = bool(files) and folder.resolve().name in OWN[1:]
    return (own or folder / "server.key" in files) and folder / "ca.crt" not in files


def _missing(folder: Path, files: Sequence[Path]) -> Iterator[Finding]:
    """Tell of what lacks beside a part of it: a pair's other half, the gateway's token, the authority's record."""
    from fedcross.core.trust import issued
    from fedcross.core.trust.keys import SECRET, lost_key
    from fedcross.core.trust.revoked import LIST
    from fedcross.deploy.federation import OPERATOR, OWN, PAGE, TOKEN
    from fedcross.deploy.tokens import GATEWAY

    names = {path.name for path in files}
    if _lacks_root(folder, files):
        cure = f"fedcross deploy federation {quoted(folder.parent)} copies it there."
        if folder.resolve().name not in OWN:
            cure = f"Copy the one that signed server.crt there: cp AUTHORITY/ca.crt {quoted(folder)}"
        yield fault(f"{folder / 'ca.crt'}: missing, and its programs need it. {cure}")
    yield from _missing_pair(folder, names)
    new_pair = "Bring it back, or make a new pair: fedcross deploy federation"
    for there, lacks, cure in (
        ("server.crt", "server.key", f"missing. {new_pair} keeps the names in {folder / 'server.crt'}."),
        ("server.key", "server.crt", f"missing. {new_pair} with --names, as the names in it are lost."),
        ("ca.key", "ca.crt", f"missing. {_root_cure(folder)}"),
        (
            "server.key",
            GATEWAY,
            "missing, so who reaches the SuperLink's port can call as a device. Make it with fedcross deploy "
            "federation, then restart the SuperLink and the gateway.",
        ),
    ):
        if there in names and lacks not in names:
            yield fault(f"{folder / lacks}: {cure}")
    part = {"superexec": SECRET, OPERATOR: TOKEN, PAGE: TOKEN}.get(folder.resolve().name)
    if part is not None and "ca.crt" in names and part not in names:
        yield fault(f"{folder / part}: missing. Make it with fedcross deploy federation, then restart the server.")
    for path in files:
        if _is_alone(path, names):
            yield fault(lost_key(path))
    if LIST in names and issued.FILE not in names:
        yield note(
            f"{folder / issued.FILE}: missing, so revoke-certificate revokes no certificate of a device but those "
            "whose files it gets. Bring it back if there was one."
        )


def _root_cure(folder: Path) -> str:
    """Return what to do about an authority's certificate that is lost, when its key is there."""
    if not any(folder.parent.glob("*/ca.crt")):
        return (
            "Bring it back: any copy of the federation's ca.crt is as good. If there never was one, as the first call "
            "was cut off, remove ca.key and call that again."
        )
    return "Bring it back: any copy of the federation's ca.crt is as good."


def _missing_pair(folder: Path, names: Collection[str]) -> Iterator[Finding]:
    """Tell of the server's pair, or a device's, if both halves are lost and the rest of its folder is there."""
    from fedcross.core.trust.keys import SECRET
    from fedcross.deploy.federation import OWN
    from fedcross.deploy.tokens import GATEWAY

    name = folder.resolve().name
    if name == "server" and {"ca.crt", GATEWAY} & {*names} and not {"server.crt", "server.key"} & {*names}:
        yield fault(
            f"{folder / 'server.crt'}, server.key: both are missing. Bring them back, or make a new pair: fedcross "
            f"deploy federation {quoted(folder.parent)} with --names, as the names in it are lost."
        )
    if name in OWN or SECRET not in names or any("-node" in one for one in names):
        return
    if name == "keys":
        cure = f"fedcross deploy rotate-key {quoted(folder.parent)} makes a new pair."
    elif (folder.parent / "public").is_dir():
        cure = f"see what fedcross deploy federation {quoted(folder.parent)} --device {quoted(name)} says."
    else:
        return
    yield fault(f"{folder}: no *-node.key and no *-node.pub. Bring them back. If they are lost, {cure}")


def _is_alone(public: Path, names: Collection[str]) -> bool:
    """Return whether this is a SuperNode's public key whose private key should be here, as the folder has its own."""
    if not public.name.endswith("-node.pub") or public.with_suffix(".key").name in names:
        return False
    folder = public.parent.resolve()
    own = public.name.removesuffix("-node.pub") in (folder.name, folder.parent.name)
    return own or any(name.endswith(".key") for name in names)


def _of_folder(path: Path) -> Finding:
    """Return the finding about a folder of keys; raise StorageError unless it is private."""
    from fedcross.core.exposed import other_owner
    from fedcross.core.private_files import check_folder, check_place

    check_place(check_folder(path).resolve().parent)
    said = other_owner(path)
    return note(said) if said else ok(f"{path}: private")


def _look(path: Path) -> None:
    """Raise StorageError unless a key, a token or a record is what it should be, and private."""
    from fedcross.core.exposed import check_owner
    from fedcross.core.trust import issued
    from fedcross.core.trust.certificates import check_key
    from fedcross.deploy import tokens
    from fedcross.deploy.federation import PAGE
    from fedcross.engines.executor import operators

    if path.suffix == ".key":
        check_key(path)
    elif path.name == issued.FILE:
        issued.kept(path.parent)
    elif path.parent.resolve().name == PAGE:
        tokens.check(path, operators.PAGE_SHORTEST)  # it can be an operator's own word
    else:
        tokens.check(path)
    check_owner(path)


def _of_file(path: Path, authority: Path) -> Finding:
    """Return the finding about a key, a certificate, a list of revoked ones, a token or a record in a folder."""
    from fedcross.core.trust.certificates import check_certificate, one_certificate, refuse_private
    from fedcross.core.trust.lasting import ends_with, renewal, soon
    from fedcross.deploy.federation import RENEW
    from fedcross.deploy.revocation import check_list, check_revoked

    early = SOON
    if path.suffix == ".crl":
        left, cure = check_list(path, authority), "Sign it again: fedcross deploy revoke-certificate."
    elif path.suffix == ".crt":
        if path.name == "ca.crt":
            one_certificate(path)
        refuse_private(path)
        left, cure = check_certificate(path, authority), f"{renewal(path, authority).capitalize()}."
        check_revoked(path, authority)
        early = soon(path, SOON)
        if path.name == "server.crt" and not ends_with(path, authority):
            early = RENEW
            root = path.parent.parent
            cure = (
                f"Renew it: fedcross deploy federation {quoted(root)} does, with ca.key in {root / 'authority'}, or "
                "else fedcross deploy server where that key is. Then restart the SuperLink and the gateway."
            )
    else:
        _look(path)
        return ok(f"{path}: {'readable' if path.suffix == '.json' else 'private'}")
    text = f"{path}: {left.days} days left"
    if left < SOON:
        return fault(f"{text}. {cure}")
    return ok(text) if left >= early else note(f"{text}. {cure}")
