"""The SuperNode's calls to the SuperLink: a call that fails for a while is made again, and each answer is noted.

Flower 1.41 and 1.42 make a call again while the SuperLink cannot be reached, without an end, with pauses that grow up
to 20 s. But status 500 (a database that is locked for some seconds) and a TLS handshake that is cut short (a gateway
that restarts) end the SuperNode's loop, and status 500 its heartbeat. Here both are passing errors too. So is status
401 where the gateway and the SuperLink have two tokens, until both were started anew; any other 401 ends the device.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
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
#: Seconds for which a call fails until the log says what the device waits for; then again after twice the time.
TOLD_S = 15.0
#: Most characters of what the SuperLink said.
LONGEST = 300
#: What a device waits for in each call.
WAITS = {
    "ActivateNode": "to join the federation",
    "PullMessages": "for work",
    "GetRun": "for the run's settings",
    "GetFab": "for the run's app",
    "PullObject": "for the content of a message",
    "ConfirmMessageReceived": "to confirm a message",
    "PushMessages": "to announce a reply",
    "PushObject": "to send a reply",
}
#: What status 401 means.
UNKNOWN = ": this device's key is not registered (any more), or its clock is more than 5 s ahead or 300 s behind"
#: What status 412 means for a device that joins.
NOT_LET_IN = (
    ": its key is not registered, or it was revoked, or a device with this key is connected (the SuperLink thinks so "
    "for a minute of one that was cut off)"
)
MEANINGS = {401: UNKNOWN, 412: NOT_LET_IN}
#: The SuperLink's words when a call does not bring the gateway's token (``entry.py``), and what they mean: no device
#: gets in.
NO_GATEWAY = "through its gateway only"
TWO_TOKENS = (
    ": its key is not the reason. Is this the SuperLink's own port (8000, usually)? Name the gateway's (8443). If it "
    "is the gateway's, the two have two different gateway.token: at the server, restart both together"
)
#: Set when the SuperLink has refused this device's key (401): Flower ends the process with exit code 0 then.
SHUT_OUT = threading.Event()
#: What such an error means.
UNTRUSTED = (
    ": the server's certificate is not signed by this device's ca.crt, or has expired, or is for another name: "
    "fedcross doctor --device FOLDER says which"
)
#: Words of an error that does not pass: the certificate is not the federation's, or has expired.
FINAL = "certificate_verify_failed"


def patience(error: Exception) -> float | None:
    """Return for how many seconds a call that ended with `error` is made again; None: Flower decides."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        if _of_two_tokens(error):
            return math.inf
        ours = error.response.is_server_error and error.response.status_code not in FLOWERS
        return BUSY_S if ours else None
    text = str(error).lower()
    handshake = isinstance(error, httpx.TransportError) and any(word in text for word in ("ssl", "tls"))
    return math.inf if handshake and FINAL not in text else None


def refused(error: Exception) -> bool:
    """Return whether the SuperLink has refused the call for good; 403 says only that the run is over."""
    import httpx

    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.is_client_error
        and error.response.status_code != httpx.codes.FORBIDDEN
        and not _of_two_tokens(error)
    )


def _untrusted(error: Exception) -> bool:
    """Return whether this device does not take the server's certificate."""
    import httpx

    return isinstance(error, httpx.TransportError) and FINAL in str(error).lower()


def _of_two_tokens(error: Exception) -> bool:
    """Return whether the call came without the gateway's token: the server's trouble, not this device's."""
    import httpx

    with suppress(httpx.StreamError):
        return _is_401(error) and NO_GATEWAY in error.response.text  # type: ignore[attr-defined]
    return False


def _is_401(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED


def reason(error: Exception) -> str:
    """Return in a few words what went wrong: the status and what the SuperLink said to it, or the connection."""
    import httpx

    if not isinstance(error, httpx.HTTPStatusError):
        return f"the SuperLink cannot be reached ({str(error).partition(chr(10))[0] or type(error).__name__})"
    text = ""
    with suppress(ValueError, AttributeError, httpx.StreamError):  # the gateway's own answers are pages
        text = str(error.response.json().get("detail") or "")
    said = "".join(c if c.isprintable() else "?" for c in text[:LONGEST]).rstrip(".")
    return f"the SuperLink answers {error.response.status_code}" + (f" ({said})" if said else "")


def meaning(error: Exception) -> str:
    """Return what an error that ends a call means for the device; "" if nothing more is known."""
    import httpx

    if _untrusted(error):
        return UNTRUSTED
    if not isinstance(error, httpx.HTTPStatusError):
        return ""
    if _of_two_tokens(error):
        return TWO_TOKENS
    return MEANINGS.get(error.response.status_code, "")


class Notices:
    """Says in the log what a device waits for: when its call has failed for a while, and seldom from then on.

    Parameters
    ----------
    clock : callable
        Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._call = threading.local()  # objects are sent and pulled by several threads

    def begin(self, name: str) -> None:
        """Note that a call begins."""
        self._call.began, self._call.name, self._call.next = self._clock(), WAITS.get(name, f"({name})"), None

    @property
    def seconds(self) -> float:
        """How long the call has lasted."""
        return self._clock() - float(self._call.began)

    def again(self, error: Exception, most: float | None) -> None:
        """The call failed and is made again, for up to `most` seconds in all (None: without an end)."""
        now, call = self._clock(), self._call
        if call.next is None:
            call.next = now if most is not None else call.began + TOLD_S
        if now < call.next:
            return
        call.next = now + max(TOLD_S, now - call.began)
        end = "without an end"
        if most is not None and math.isfinite(most):
            latest = datetime.now().astimezone() + timedelta(seconds=most - (now - call.began))
            end = f"until {latest:%H:%M:%S %Z} at the latest"
        why = reason(error) + (TWO_TOKENS if _of_two_tokens(error) else "")
        log(WARNING, "fedcross: waiting %s for %.0f s: %s; asked again, %s", call.name, self.seconds, why, end)

    def over(self, error: Exception) -> None:
        """The call failed and is not made again."""
        import httpx

        if isinstance(error, httpx.HTTPStatusError) or _untrusted(error):
            given_up(self._call.name, error)


def given_up(what: str, error: Exception) -> None:
    """Say in the log why a call is not made again, and note if that ends the device."""
    log(WARNING, "fedcross: given up %s: %s%s", what, reason(error), meaning(error))
    if _is_401(error):
        SHUT_OUT.set()


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
        gives_up, invoke, notices = invoker.should_giveup, invoker.invoke, Notices(clock)

        def giveup(error: Exception) -> bool:
            seconds = patience(error)
            if refused(error):  # before Flower ends the device
                notices.over(error)
                over = bool(gives_up(error))
            elif seconds is None:
                if _untrusted(error):
                    notices.over(error)
                over = bool(gives_up(error))
            elif over := notices.seconds > seconds:
                notices.over(error)
            if not over:
                notices.again(error, seconds)
            return over

        def begin(target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            notices.begin(getattr(target, "__name__", "a call"))
            return invoke(target, *arguments, **named)

        invoker.should_giveup, invoker.invoke = giveup, begin
        return invoker

    return made


def beating(heartbeat: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's call of a heartbeat; an error that passes counts as no answer, and ends no thread or device."""
    import httpx

    @functools.wraps(heartbeat)
    def call(*arguments: Any) -> Any:
        try:
            return heartbeat(*arguments)
        except httpx.HTTPStatusError as error:
            if patience(error) is None:
                if _is_401(error):
                    given_up("to tell that this device is there", error)
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
