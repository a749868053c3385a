"""Until when certificates last, from when on that is told, and what to do then."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from fedcross.core.trust import cures
from fedcross.core.trust.certificates import for_clients, is_authority, read_certificate
from fedcross.core.trust.signing import MAX_LEAF_DAYS

#: An authority that ends sooner is told of: each device needs the certificate of its successor.
AUTHORITY_SOON = timedelta(days=MAX_LEAF_DAYS)


def end(path: Path) -> datetime:
    """Return when a certificate ends, in UTC."""
    return read_certificate(path).not_valid_after_utc


def ends_with(path: Path, authority: Path) -> bool:
    """Return whether a certificate lasts as long as its authority, so that no new one would last longer."""
    return end(path) >= end(authority)


def renewal(path: Path, authority: Path) -> str:
    """Return what to do about a certificate of `authority` that ends soon."""
    found = read_certificate(path)
    if is_authority(found):
        return cures.NEW_AUTHORITY
    if ends_with(path, authority):
        return f"it ends with its authority: {cures.NEW_AUTHORITY}"
    return f"rotate it now: fedcross deploy {'client' if for_clients(found) else 'federation'}"


def soon(path: Path, usual: timedelta) -> timedelta:
    """Return with how much time left a certificate is told of: `usual`, but more for an authority's."""
    return AUTHORITY_SOON if is_authority(read_certificate(path)) else usual
