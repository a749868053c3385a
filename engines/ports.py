"""Whether a program can listen on an address: tried before it starts, so that a taken port is named at once."""

from __future__ import annotations

import errno
import socket

from fedcross.core.errors import FederationError


def fault(host: str, port: int) -> str:
    """Return why nobody can listen on `port` (0: any free one) of the interface `host` now; "" if somebody can.

    `host` is a name or an address, "" or ``*`` for all. A port on which another program listens is taken, also if both
    would share it (``SO_REUSEPORT``).
    """
    if not 0 <= port <= 65535:
        return f"port {port}: there is no such port. Choose one up to 65535."
    name = host.strip("[]*") or None
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], found[0][1], found[0][2]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        advice = "Choose an address of this machine."
        if isinstance(error, PermissionError):
            advice = "Choose a port above 1023."
        elif getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = "Stop the program that uses it, or choose another port."
        return f"port {port}: {getattr(error, 'strerror', None) or error}. {advice}"
    return ""


def check(host: str, port: int, option: str) -> None:
    """Raise a FederationError, which names `option`, if nobody can listen on `port` of `host` now."""
    if said := fault(host, port):
        raise FederationError(f"{option}: {said}")
