"""Whether a program can listen on an address: tried before it starts, so that a taken port is named at once."""

from __future__ import annotations

import errno
import socket

from fedcross.core.errors import FederationError


def is_host(host: str) -> bool:
    """Return whether `host` can be the name or address of a machine: none of its labels is empty or too long."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def fault(host: str, port: int, other: str = "port") -> str:
    """Return why nobody can listen on `port` of `host` now; "" if somebody can.

    A port on which another program listens is taken, also if both would share it (``SO_REUSEPORT``).

    Parameters
    ----------
    host : str
        Name or address of an interface; an IPv6 address may have brackets; "" or ``*`` for all.
    port : int
        0 for any free one.
    other : str
        What may be chosen instead of a taken one.
    """
    bare, flags = host.strip("[]"), socket.AI_PASSIVE
    if not 0 <= port <= 65535:
        return f"port {port}: there is no such port. Choose one up to 65535."
    try:
        found = socket.getaddrinfo(None if bare in ("", "*") else bare, port, type=socket.SOCK_STREAM, flags=flags)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        cure = "Choose an address of this machine."
        if isinstance(error, PermissionError):
            cure = "Choose a port above 1023."
        elif isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            cure = f"Stop the program that uses it, or choose another {other}."
        return f"port {port}: {getattr(error, 'strerror', None) or error}. {cure}"
    return ""


def check(host: str, port: int, option: str, other: str = "port") -> None:
    """Raise a FederationError, which names `option`, if nobody can listen on `port` of `host` now."""
    if said := fault(host, port, other):
        raise FederationError(f"{option}: {said}")
