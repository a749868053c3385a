"""The entry of the SuperLink: it reads no body of a caller that it does not know. Headers alone tell who calls.

Whoever reaches the SuperLink's port (any user of its machine does, also into a container's own network) could else send
gigabytes: Flower reads a call as a whole before it asks who makes it. So each interface asks first for something that a
stranger does not have:

=================  ===================================================================================================
``/v1/control/``   the operator's token (:mod:`operators`)
``/v1/fleet/``     the gateway's token, if there is one; only then the address counts that the gateway names
``/v1/runtime/``   the SuperExec's signature for the next task; for all other calls the token of a task under way
=================  ===================================================================================================

A refused call is answered without reading on, its connection is closed, and the log gets one line a minute at most.
Of all other paths there is ``/health`` alone, without a body: Flower's pages on its interface have large answers, which
the SuperLink would keep for whoever does not read them.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.common.logger import log
from flwr.supercore import constant
from flwr.supercore.auth import superexec as signing
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware

from .fair import AWAY, current
from .operators import ANOTHER, CONTROL, HEADER, WHY
from .replies import AGAIN_S

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

FLEET, RUNTIME, HEALTH = "/v1/fleet/", "/v1/runtime/", "/health"
ACQUIRE, RESPONSES = f"{RUNTIME}acquire-task", f"{RUNTIME}responses"
#: The name under which the SuperExec signs its question for the next task.
SIGNED_AS = "/flwr.proto.Runtime/AcquireTask"
GATEWAY, FORWARDED = "fedcross-gateway", "x-forwarded-for"
#: Most bytes of a question for the next task.
SMALL = 65536
#: Characters of a task's token, as Flower makes them.
TOKEN_LENGTH = 256
#: Tokens that are remembered, and how many questions for others wait for the database at most.
REMEMBERED, LOOKUPS = 1000, 4
#: Seconds between two lines on refused calls.
TELL_S = 60.0
UNAUTHORIZED, NOT_FOUND, BUSY = 401, 404, 503
NOT_THE_GATEWAY = "devices reach this SuperLink through its gateway only"
NO_TASK = "this interface takes calls of the SuperExec and of the tasks under way only"


class RefusedError(Exception):
    """A call is not read.

    Attributes
    ----------
    status : int
        Of the answer.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def values(headers: Headers, name: str) -> list[bytes]:
    """Return all values of a header."""
    wanted = name.encode()
    return [value for key, value in headers if key == wanted]


def brings_body(headers: Headers) -> bool:
    """Return whether a body follows these headers."""
    lengths = values(headers, "content-length")
    return bool(values(headers, "transfer-encoding")) or any(length.strip(b"0 ") for length in lengths)


def brought(headers: Headers, name: str, token: str) -> bool:
    """Return whether the header is there once, with this token; of two, nobody knows which one counts."""
    said = values(headers, name)
    return len(said) == 1 and hmac.compare_digest(said[0], token.encode())


def signed(headers: Headers, secret: bytes, now: float) -> bool:
    """Return whether these are the headers of a SuperExec's question that has `secret`, and the body is small.

    Flower checks the same again, besides that the body is the signed one and comes for the first time.
    """
    names = (
        constant.SUPEREXEC_AUTH_TIMESTAMP_HEADER,
        constant.SUPEREXEC_AUTH_NONCE_HEADER,
        constant.SUPEREXEC_AUTH_BODY_SHA256_HEADER,
        constant.SUPEREXEC_AUTH_SIGNATURE_HEADER,
    )
    found = [values(headers, name) for name in names]
    length = values(headers, "content-length")
    if any(len(one) != 1 for one in (*found, length)):
        return False
    try:
        if not (length[0].isdigit() and int(length[0]) <= SMALL):
            return False
        when, nonce, body, signature = (one[0].decode("ascii") for one in found)
        if not constant.MIN_TIMESTAMP_DIFF_SECONDS < now - int(when) < constant.MAX_TIMESTAMP_DIFF_SECONDS:
            return False
        wanted = signing.compute_superexec_signature(
            auth_secret=signing.derive_auth_secret(secret),
            method=SIGNED_AS,
            timestamp=int(when),
            nonce=nonce,
            body_sha256=body,
        )
        return hmac.compare_digest(wanted, signature)
    except (ValueError, OverflowError):  # the latter of a time with some 309 digits or more
        return False


def task_token(path: str, headers: Headers) -> str:
    """Return the token of a task that a call of the Runtime API brings; empty if none that Flower could have made."""
    if path == RESPONSES:
        [kind, _, said] = (values(headers, "authorization") or [b""])[0].partition(b" ")
        found = [said] if kind.lower() == b"bearer" else []
    else:
        found = values(headers, constant.TASK_TOKEN_HEADER)
    if len(found) != 1 or len(found[0]) != TOKEN_LENGTH or not found[0].isalnum():
        return ""
    return found[0].decode("ascii", "replace")


class Tasks:
    """The tokens of tasks that are under way: those that this process has given out, else what the database says.

    A token that was good once is not asked for again: its program may send a body, and Flower refuses the call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._asking = 0

    def add(self, token: str) -> None:
        """Remember a token; the oldest is forgotten."""
        self._known[hashlib.sha256(token.encode()).digest()] = None
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def given(self, acquire: Callable[..., Any]) -> Callable[..., Any]:
        """Return Flower's handler that gives out a task; its token is known from then on."""

        @functools.wraps(acquire)
        def call(*arguments: Any, **named: Any) -> Any:
            answer = acquire(*arguments, **named)
            if answer.token:
                self.add(answer.token)
            return answer

        return call

    async def know(self, token: str, state: Callable[[], Any]) -> bool:
        """Return whether `token` is a task's; `state` gives Flower's state.

        Raises
        ------
        RefusedError
            If too many others are being asked for: the SuperLink has just started, or somebody tries tokens.
        """
        if not token:
            return False
        if hashlib.sha256(token.encode()).digest() in self._known:
            return True
        if self._asking >= LOOKUPS:
            raise RefusedError(BUSY, "The SuperLink is busy.")
        self._asking += 1
        try:
            found = await run_in_threadpool(lambda: state().get_task_by_token(token) is not None)
        finally:
            self._asking -= 1
        if found:
            self.add(token)
        return found


class Entry:
    """An ASGI application before all others of the SuperLink.

    Parameters
    ----------
    app : callable
        What comes next.
    operator, gateway : str
        The operator's and the gateway's token; empty: none is asked for.
    tasks : Tasks
        The tokens of tasks.
    clock : callable
        Tells the time in seconds, for the lines on refused calls.
    """

    def __init__(
        self,
        app: Application,
        operator: str,
        gateway: str,
        tasks: Tasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._operator, self._gateway, self._tasks, self._clock = app, operator, gateway, tasks, clock
        self._refused, self._told = 0, -math.inf

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a call on, or refuse it from its headers alone."""
        if scope["type"] == "http":
            try:
                await self._look(scope)
            except RefusedError as refused:
                await self._refuse(scope, send, refused)
                return
        await self._app(scope, receive, send)

    async def _look(self, scope: Message) -> None:
        path, headers = scope["path"], scope["headers"]
        if path.startswith(CONTROL) and self._operator and not brought(headers, HEADER, self._operator):
            raise RefusedError(UNAUTHORIZED, ANOTHER if any(values(headers, HEADER)) else WHY)
        if path.startswith(FLEET) and self._gateway:
            if not brought(headers, GATEWAY, self._gateway):
                raise RefusedError(UNAUTHORIZED, NOT_THE_GATEWAY)
            self._name(scope)
        if not path.startswith((CONTROL, FLEET, RUNTIME)) and (path != HEALTH or brings_body(headers)):
            raise RefusedError(NOT_FOUND, "no such path")
        if path.startswith(RUNTIME) and not await self._own(path, headers, scope["app"].state):
            raise RefusedError(UNAUTHORIZED, NO_TASK)

    async def _own(self, path: str, headers: Headers, flower: Any) -> bool:
        """Return whether one of the server's own programs calls."""
        if path == ACQUIRE:
            secret = flower.superexec_auth_secret
            return secret is None or signed(headers, secret, time.time())
        return await self._tasks.know(task_token(path, headers), flower.runtime_state_factory.state)

    @staticmethod
    def _name(scope: Message) -> None:
        """Take the address that the gateway names for the caller's; Uvicorn's log shows it too."""
        for said in values(scope["headers"], FORWARDED)[-1:]:
            try:
                scope["client"] = (str(ipaddress.ip_address(said.decode("ascii").strip())), 0)
            except ValueError:
                return

    async def _refuse(self, scope: Message, send: Send, refused: RefusedError) -> None:
        self._refused += 1
        now = self._clock()
        if now - self._told >= TELL_S:
            here = (scope.get("client") or ("?",))[0]
            log(
                logging.WARNING, "fedcross: %d calls refused unread, the last from %s: %s", self._refused, here, refused
            )
            self._refused, self._told = 0, now
        current.set(AWAY)  # no line in the web server's log
        body = str(refused).encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        if refused.status == BUSY:
            headers.append((b"retry-after", str(AGAIN_S).encode()))
        await send(
            {"type": "http.response.start", "status": refused.status, "headers": [*headers, (b"connection", b"close")]}
        )
        await send({"type": "http.response.body", "body": body})


def before(
    middleware: Callable[[], tuple[Middleware, ...]], operator: str, gateway: str, tasks: Tasks
) -> Callable[[], tuple[Middleware, ...]]:
    """Return Flower's list of what stands before its application, with the entry as the first."""

    @functools.wraps(middleware)
    def found() -> tuple[Middleware, ...]:
        return (Middleware(Entry, operator=operator, gateway=gateway, tasks=tasks), *middleware())

    return found
