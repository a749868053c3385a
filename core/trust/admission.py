"""Which partition a registered key may hold, and its short name: the SuperLink's database keeps the node's name.

Only the SuperLink's inner network can register a key, so a device cannot choose or change this name.
"""

from __future__ import annotations

import hashlib
import re

from fedcross.core.errors import ConfigError

#: The highest number of a partition: :func:`bound_partition` and ``engines.executor.admitted`` read nine digits.
LAST_PARTITION = 999_999_999
_NAME = re.compile(r"partition-(0|[1-9]\d{0,8})")


def check_partition(partition: int) -> int:
    """Return `partition` if a key can be bound to this number; else raise ConfigError."""
    if not 0 <= partition <= LAST_PARTITION:
        raise ConfigError(f"--partition {partition}: give a number from 0 to {LAST_PARTITION}.")
    return partition


def node_name(partition: int) -> str:
    """Return the name under which the key of `partition` is registered."""
    return f"partition-{partition}"


def fingerprint(key: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a node's public `key`, its name in tables."""
    return hashlib.sha256(key).hexdigest()[:16]


def bound_partition(name: str) -> int | None:
    """Return the partition to which a node of this name is bound; None if to none."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None
