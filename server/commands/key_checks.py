"""Checks of ``fedcross doctor --keys``: a folder of keys and certificates, of the server or of the authority."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from fedcross.core.errors import StorageError
from fedcross.server.commands.findings import Finding, fault, note, ok

#: With this much time left, a certificate can be rotated in working hours.
SOON = timedelta(days=7)


def check_keys(folder: Path, authority: Path | None) -> Iterator[Finding]:
    """Check modes of keys, signatures and dates of certificates in `folder`, that pairs are whole and belong together.

    Raises
    ------
    PermissionError
        If this user may not look into the folder.
    """
    if not folder.is_dir():
        yield fault(f"{folder}: no such folder. {_first(folder)}")
        return
    from fedcross.core.issued import FILE

    files = sorted(folder.iterdir())
    certificates = [path for path in files if path.suffix == ".crt"]
    keys = [path for path in files if path.suffix == ".key"]
    if not certificates and not keys:
        if parts := [str(path) for path in files if path.is_dir() and any(path.glob("*.crt"))]:
            yield fault(f"{folder}: the keys are in its folders. Name those: fedcross doctor --keys {' '.join(parts)}")
            return
        yield fault(f"{folder}: no .crt and no .key in this folder. {_first(folder)}")
    yield from _missing(folder, files)
    root = authority or folder / "ca.crt"
    if certificates and not root.exists():
        yield fault(f"{root}: no such file. Name the authority's certificate with --authority.")
        certificates = []
    lists = [path for path in files if path.suffix == ".crl" or path.name.endswith("token") or path.name == FILE]
    told: set[str] = set()
    for path in [folder, *keys, *certificates, *lists]:
        try:
            yield _of_file(path, root)
        except StorageError as error:
            if str(error) not in told:  # what is wrong with the authority's files is so for each certificate
                yield fault(str(error))
            told.add(str(error))


def _first(folder: Path) -> str:
    """Return what to do about a folder without keys: none are made where others show that there were some."""
    copies = [path for path in sorted(folder.parent.glob("*/ca.crt")) if path.parent != folder]
    if not copies:
        return "Make keys with fedcross deploy federation."
    if folder.name == "authority":
        return (
            f"Bring it back, or put the copy {copies[0]} into it (nothing can be signed then). A new authority locks "
            "out all devices."
        )
    return f"Bring it back. If it is lost, see what fedcross deploy federation {folder.parent} says."


def _missing(folder: Path, files: Sequence[Path]) -> Iterator[Finding]:
    """Tell of what lacks beside a part of it: a pair's other half, the gateway's token, the authority's record."""
    from fedcross.core import issued
    from fedcross.core.keys import SECRET, lost_key
    from fedcross.core.revoked import LIST
    from fedcross.deploy.federation import OPERATOR, PAGE, TOKEN
    from fedcross.deploy.tokens import GATEWAY

    names = {path.name for path in files}
    new_pair = "Bring it back, or make a new pair: fedcross deploy federation"
    for there, lacks, cure in (
        ("server.crt", "server.key", f"missing. {new_pair} keeps the names in {folder / 'server.crt'}."),
        ("server.key", "server.crt", f"missing. {new_pair} with --names, as the names in it are lost."),
        ("ca.key", "ca.crt", "missing. Bring it back: any copy of the federation's ca.crt is as good."),
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


def _is_alone(public: Path, names: Collection[str]) -> bool:
    """Return whether this is a SuperNode's public key whose private key should be here, as the folder has its own."""
    if not public.name.endswith("-node.pub") or public.with_suffix(".key").name in names:
        return False
    folder = public.parent.resolve()
    own = public.name.removesuffix("-node.pub") in (folder.name, folder.parent.name)
    return own or any(name.endswith(".key") for name in names)


def _look(path: Path) -> None:
    """Raise StorageError unless a folder of keys, a key, a token or a record is what it should be, and private."""
    from fedcross.core import issued
    from fedcross.core.certificates import check_key
    from fedcross.core.private_files import check_folder
    from fedcross.deploy import tokens
    from fedcross.deploy.federation import PAGE

    if path.is_dir():
        check_folder(path)
    elif path.suffix == ".key":
        check_key(path)
    elif path.name == issued.FILE:
        issued.valid(path.parent)
    elif path.parent.resolve().name == PAGE:
        tokens.check(path, shortest=1)  # the page's can be an operator's own word
    else:
        tokens.check(path)


def _of_file(path: Path, authority: Path) -> Finding:
    """Return the finding about a folder of keys, or about a key, a certificate or a list of revoked ones in it."""
    from fedcross.core.certificates import check_certificate, one_certificate, renewal, soon
    from fedcross.deploy.revocation import check_list, check_revoked

    early = SOON
    if path.suffix == ".crl":
        left, cure = check_list(path, authority), "Sign it again: fedcross deploy revoke-certificate."
    elif path.suffix == ".crt":
        if path.name == "ca.crt":
            one_certificate(path)
        left, cure = check_certificate(path, authority), f"{renewal(path).capitalize()}: fedcross deploy."
        check_revoked(path, authority)
        early = soon(path, SOON)
    else:
        _look(path)
        return ok(f"{path}: {'readable' if path.suffix == '.json' else 'private'}")
    text = f"{path}: {left.days} days left"
    if left < SOON:
        return fault(f"{text}. {cure}")
    return ok(text) if left >= early else note(f"{text}. {cure}")
