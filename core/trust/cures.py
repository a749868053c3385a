"""What to do about a certificate that is lost, another authority's or at its end, in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import quoted

NEW_AUTHORITY = "make a new authority and hand its ca.crt to all devices"


def lost(path: Path) -> str:
    """Return what to do about a certificate that cannot be read."""
    if path.name == "ca.crt":
        return (
            "Bring it back: any copy of the federation's ca.crt is as good (on the server, fedcross deploy federation "
            "puts it there, or says how)."
        )
    if path.name == "server.crt":
        return "Bring it back, or make a new pair: fedcross deploy federation, with --names for the names in it."
    return "Bring it back, or make it again: fedcross deploy client."


def unsigned(authority: Path, *, root: bool, client: bool) -> str:
    """Return what to do about a certificate, a root or a client's or the server's, that `authority` did not sign."""
    if root:
        return (
            "It is another authority's. Put the federation's ca.crt there (fedcross deploy federation does, in its own "
            "folders)."
        )
    if client:
        return f"If {authority} is the right one, make it again: fedcross deploy client."
    return f"It or {authority} is another authority's: fedcross deploy federation puts both right, or says how."


def expired_root(path: Path) -> str:
    """Return what to do about an authority's certificate that has expired."""
    folder = path.parent
    if not path.with_name("ca.key").exists() and folder.resolve().name != "authority":
        if (folder.parent / "authority").is_dir():
            return f"See what fedcross deploy federation {quoted(folder.parent)} says."
        return "Copy the new ca.crt from the server. If it has none: there, fedcross deploy federation says what to do."
    named = folder.resolve().name == "authority"
    again = f"federation {quoted(folder.parent)}" if named else f"authority {quoted(folder)}"
    return (
        f"Move the files in {folder} away, make a new authority (fedcross deploy {again}) and hand its ca.crt to all "
        "devices."
    )


def expired(path: Path, *, client: bool) -> str:
    """Return what to do about a certificate of a client or the server that has expired, when its authority has not."""
    root = path.parent.parent  # a server's folder stands in the federation's
    if client or not (root / "authority").is_dir():
        return f"Make it again: fedcross deploy {'client' if client else 'federation FOLDER'}."
    return f"Make it again: fedcross deploy federation {quoted(root)}."


def early(path: Path, *, root: bool, names: Sequence[str]) -> str:
    """Return what to do about a certificate that begins later: a root, a server's with `names`, or a client's."""
    folder = path.parent
    if root:
        if not path.with_name("ca.key").exists():
            return "copy the ca.crt from where the authority is, which is to be made anew if it begins later there too."
        return (
            f"wait until then, or move the files in {folder} away, make a new authority (fedcross deploy authority "
            f"{quoted(folder)}) and hand its ca.crt to all devices."
        )
    authority = folder.parent / "authority"
    place = quoted(authority) if authority.is_dir() else "AUTHORITY"
    if names:
        return f"make it again: fedcross deploy server {place} {quoted(folder)} {' '.join(names)}"
    return f"make it again: fedcross deploy client {place} {quoted(folder)} {quoted(path.stem)}"
