"""Which partition a registered key may hold: the SuperLink stores it as the name of the node.

Only an operator can register a key, so a device cannot choose or change this name.
"""

from __future__ import annotations

import hashlib
import re

_NAME = re.compile(r"partition-(0|[1-9]\d{0,8})")


def node_name(partition: int) -> str:
    """Return the name under which the key of `partition` is registered."""
    return f"partition-{partition}"


def bound_partition(name: str) -> int | None:
    """Return the partition to which a node of this name is bound; None if to none."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def fingerprint(key: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a node's public `key`, its name in tables."""
    return hashlib.sha256(key).hexdigest()[:16]
