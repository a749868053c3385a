"""The SuperNode's calls to the SuperLink: a call that fails for a while is made again, and each answer is noted.

Flower 1.41 and 1.42 make a call again while the SuperLink cannot be reached, without an end, with pauses that grow up
to 20 s. But status 500 (a database that is locked for some seconds) and a TLS handshake that is cut short (a gateway
that restarts) end the SuperNode's loop, and status 500 its heartbeat. Here both are passing errors too.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from importlib import import_module
from logging import WARNING
from typing import Any

from flwr.common.logger import log

CONNECTION, CLIENT = "flwr.supernode.fleet_http_connection", "FleetHttpClient"
MAKER, CALLS = "make_simple_http_retry_invoker", ("SendNodeHeartbeat", "_unary_unary")
#: Seconds for which one call is made again after an error of the SuperLink itself, as the ServerApp's calls are. If it
#: fails for longer, a reply that is sent is lost, and any other call ends the SuperNode, which is then started again.
BUSY_S = 300.0
#: Flower makes calls with these again itself, without an end.
FLOWERS = (502, 503, 504)
#: Words of an error that does not pass: the certificate is not the federation's, or has expired.
FINAL = "certificate_verify_failed"


def patience(error: Exception) -> float | None:
    """Return for how many seconds a call that ended with `error` is made again; None: Flower decides."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        ours = error.response.is_server_error and error.response.status_code not in FLOWERS
        return BUSY_S if ours else None
    text = str(error).lower()
    handshake = isinstance(error, httpx.TransportError) and any(word in text for word in ("ssl", "tls"))
    return math.inf if handshake and FINAL not in text else None


def enduring(make: Callable[[], Any], clock: Callable[[], float] = time.monotonic) -> Callable[[], Any]:
    """Return Flower's maker of what makes calls again, with our :func:`patience`.

    Parameters
    ----------
    make : callable
        Flower's.
    clock : callable
        Tells the time in seconds.
    """

    @functools.wraps(make)
    def made() -> Any:
        invoker = make()
        gives_up, invoke = invoker.should_giveup, invoker.invoke
        call = threading.local()  # objects are sent and pulled by several threads

        def giveup(error: Exception) -> bool:
            if (seconds := patience(error)) is None:
                return bool(gives_up(error))
            began: float = call.began
            if clock() - began > seconds:
                return True
            why = str(error).partition("\n")[0]
            log(WARNING, "fedcross: a call to the SuperLink failed and is made again: %s", why)
            return False

        def begin(target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            call.began = clock()
            return invoke(target, *arguments, **named)

        invoker.should_giveup, invoker.invoke = giveup, begin
        return invoker

    return made


def beating(heartbeat: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's call of a heartbeat; an error of the SuperLink itself counts as no answer and ends no thread."""
    import httpx

    @functools.wraps(heartbeat)
    def call(*arguments: Any) -> Any:
        try:
            return heartbeat(*arguments)
        except httpx.HTTPStatusError as error:
            if patience(error) is None:
                raise
            raise httpx.ReadError(f"status {error.response.status_code}", request=error.request) from error

    return call


def noting(unary: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """Return Flower's call to the SuperLink, which calls `note` after each answer."""

    @functools.wraps(unary)
    def call(*arguments: Any, **named: Any) -> Any:
        found = unary(*arguments, **named)
        note()
        return found

    return call


def endure(note: Callable[[], None]) -> None:
    """Change the calls of this process's SuperNode; calls of another kind stay Flower's, and the log says so."""
    connection = import_module(CONNECTION)
    client: Any = getattr(connection, CLIENT, None)
    if not hasattr(connection, MAKER) or not all(hasattr(client, name) for name in CALLS):
        log(WARNING, "fedcross: %s has no calls that are known; an error of the SuperLink ends this device", CONNECTION)
        return
    setattr(connection, MAKER, enduring(getattr(connection, MAKER)))
    client.SendNodeHeartbeat = beating(client.SendNodeHeartbeat)
    client._unary_unary = noting(client._unary_unary, note)
