"""Keys that others on the machine can use, or that another user owns: found, and what to do about them in words."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import dangling

#: A file of one of the server's programs -> whose folder it shows.
PROGRAMS = {
    "server.pem": "the gateway's folder",
    "superlink.db": "the SuperLink's folder",
    "revoked-keys.json": "the SuperLink's folder",
}
_AUTHORITY = "make a new authority and hand its ca.crt to all devices"


def cure(path: Path, mode: str) -> str:
    """Return what to do about a key, a token or a folder of them that is open; `mode` is what it should have.

    It is closed first: nothing makes new keys in an open folder.
    """
    close = f"Close it first: chmod {mode} {quoted(path)}"
    if not path.is_dir():
        return f"{close}\nIf it may have been read, {replacement(path)}."
    kinds = {replacement(file): file.name for file in reversed(_secrets(path))}
    told = "; ".join(f"{name}: {words}" for words, name in reversed(kinds.items()))
    return f"{close}\nIf what is in it may have been read: {told}." if told else close


def key_in(folder: Path) -> Path | None:
    """Return the first file by which `folder` is one of keys: a key, a token or ``ca.crt``; None without one."""
    with contextlib.suppress(OSError):  # no folder, or one that this user may not list
        files = (file for file in sorted(folder.iterdir()) if not file.is_dir())
        return next((file for file in files if _is_secret(file) or file.name == "ca.crt"), None)
    return None


def taken(folder: Path) -> str:
    """Return what `folder` is, if no run may write there; or "".

    It is one of keys, in itself or in a folder in it (a federation's, a device's bundle), the gateway's or the
    SuperLink's: who may read a run, or copies it away, shall get nothing of these.
    """
    if (key := key_in(folder)) is not None:
        return f"a folder of keys, with {key.name}"
    with contextlib.suppress(OSError):
        names = {path.name: path for path in sorted(folder.iterdir())}
        if name := next((name for name in PROGRAMS if name in names), ""):
            return f"{PROGRAMS[name]}, with {name}"
        for path in names.values():
            if path.is_dir() and (keys := _secrets(path)):
                return f"a folder of folders of keys, with {path.name}/{keys[0].name}"
    return ""


def _secrets(folder: Path) -> list[Path]:
    """Return the keys and tokens in a folder; none if this user may not list it."""
    with contextlib.suppress(OSError):
        return sorted(file for file in folder.iterdir() if _is_secret(file) and not file.is_dir())
    return []


def _is_secret(file: Path) -> bool:
    return file.suffix == ".key" or file.name.endswith("token")


def replacement(path: Path) -> str:
    """Return what makes a key that somebody else may have worthless."""
    if path.name == "ca.key":
        return _AUTHORITY
    if path.name == "server.key":
        return f"{_AUTHORITY} (after a new pair, the old one is good for devices until its certificate ends)"
    if path.stem.endswith("-node"):
        return "give the device a new key (fedcross deploy rotate-key) and revoke the old one"
    if path.name == "superexec.key":
        return (
            "remove it: fedcross deploy federation makes a new one (in a device's bundle: fedcross deploy rotate-key "
            "--secret)"
        )
    if path.name.endswith("token"):
        return "remove it: fedcross deploy federation makes a new one; restart the programs that it names"
    if path.suffix == ".key":
        return "revoke its certificate (fedcross deploy revoke-certificate) and make a new one (fedcross deploy client)"
    return "make it anew"


def check_owner(path: Path) -> Path:
    """Return `path` if this key or token belongs to the owner of its folder, or to this user; else raise StorageError.

    A private mode keeps out all but the owner: another user as the owner can read it, and who needs it cannot. What a
    link leads to belongs to the owner of the link's folder too, or to root, as a mounted secret does.
    """
    if said := dangling(path):
        raise StorageError(f"{said} Is its disk mounted?")
    place = Path(os.path.realpath(path))
    owner, folder, user = place.stat().st_uid, place.parent.stat().st_uid, os.geteuid()
    if owner == user != 0:
        return path
    if path.is_symlink() and owner not in (0, here := path.parent.stat().st_uid):
        raise StorageError(
            f"{path}: a link to {place}, which user {owner} owns, and can read, though user {here} owns the link's "
            f"folder. Put the file itself here, or give it to that user. If user {owner} is a stranger, "
            f"{replacement(path)}."
        )
    if owner == folder:
        return path
    if owner == 0:
        raise StorageError(
            f"{path}: user 0 owns it, so user {folder}, who owns its folder, cannot read it. {given(path)}"
        )
    raise StorageError(
        f"{path}: user {owner} owns it, and can read it, though user {folder} owns its folder. {given(path)}\n"
        f"If that is a stranger, {replacement(path)}."
    )


def other_owner(path: Path) -> str:
    """Return what to say of a folder of keys that is another user's than the folder above and than this user's; or "".

    Root's folder may hold those of services, each with a user of its own. A user's may too, so this is no fault.
    """
    place = Path(os.path.realpath(path))
    owner, above = place.stat().st_uid, place.parent.stat().st_uid
    if owner in (above, 0) or above == 0 or owner == os.geteuid():
        return ""
    return (
        f"{path}: user {owner} owns this folder of keys, and can read them, though user {above} owns {place.parent}. "
        f"That is right for a service's own user. If user {owner} is a stranger: chown -R {above} {quoted(place)}, and "
        "make the keys in it anew."
    )


def given(path: Path) -> str:
    """Return the command that gives a file to the owner of its folder."""
    owner = Path(os.path.realpath(path)).parent.stat()
    return f"Give it to the owner of its folder: chown {owner.st_uid}:{owner.st_gid} {quoted(path)}"


def unreadable(path: Path) -> str:
    """Return what to do about a file that this user may not read."""
    place = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):
        if place.stat().st_uid != place.parent.stat().st_uid:
            return given(path)
    return "Run as the owner of the keys."
