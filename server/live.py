"""Serves the live page, its events and ``/metrics`` from a thread of the server's process (``serve.page=true``).

On the loopback interface anybody on this machine may look; requests under another host name are refused, so that a web
page elsewhere cannot read along. On any other interface a token is needed (:mod:`page_variables`).

A run must not end or wait because of its page: the thread only reads, and its errors are logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from logging import WARNING
from pathlib import Path
from urllib.parse import quote

from flwr.common.logger import log
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Stream
from starlette.routing import Route
from uvicorn import Config, Server

from fedcross.core.errors import FedcrossError
from fedcross.core.events import say
from fedcross.core.private_files import write_private
from fedcross.engines.executor.punctual import Punctual
from fedcross.server.board import Board
from fedcross.server.gauges import RunCollector
from fedcross.server.live_page import PAGE
from fedcross.server.page_variables import given_token, is_loopback, proxied

COOKIE = "fedcross-page"
#: File in the run's folder with the page's address, and its token if it has one; for this user only, whoever may read
#: the run's other files.
ADDRESS = "page.url"
#: Seconds between two looks at the board; after so many without news, a sign of life.
LOOK_S, QUIET_S = 0.5, 15.0
#: Longest time that the end of a run waits for its page.
END_S = 2.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Live:
    """The page of one run.

    Parameters
    ----------
    board : Board
        What is shown.
    folder : Path
        The run's folder.
    host : str
        Address of the interface.
    port : int
        0 for any free one.

    Raises
    ------
    OSError
        If the port is taken.
    FedcrossError
        If the token is none or cannot be read, or its address cannot be written.
    """

    def __init__(self, board: Board, folder: Path, host: str, port: int) -> None:
        self.board = board
        local = is_loopback(host)
        base, self.token = proxied(), given_token(host) or ("" if local else secrets.token_urlsafe(24))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port = int(self._socket.getsockname()[1])
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(board, folder))
        rules = {"http": Punctual, "ws": "none", "lifespan": "off", "access_log": False, "log_config": None}
        self._server = Server(Config(self.app(local), timeout_graceful_shutdown=1, **rules))  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, name="fedcross-page", daemon=True)
        shown = f"[{host}]" if ":" in host else host
        self.url = base or f"http://{shown}:{self.port}/"
        if self.token:
            self.url += f"?token={quote(self.token, safe='')}"
        self._address = folder / ADDRESS
        write_private(self._address, f"{self.url}\n".encode())

    def app(self, local: bool) -> Starlette:
        """Return the web application; `local`: only this machine reaches it."""
        hosts = ["127.0.0.1", "localhost", "[::1]"] if local and not self.token else ["*"]
        routes = [
            Route("/", self._page),
            Route("/state", self._state),
            Route("/events", self._events),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def close(self) -> None:
        """End; open pages get the last state before."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(END_S)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._address.unlink()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception as error:  # noqa: BLE001 - whatever happens here must not reach the run
            log(WARNING, "fedcross: the live page has ended: %s: %s", type(error).__name__, error)
        finally:
            self._socket.close()

    # ---- requests -----------------------------------------------------------------------------------------------

    def _refused(self, request: Request) -> Response | None:
        if not self.token:
            return None
        header = request.headers.get("authorization", "")
        given = header.removeprefix("Bearer ") if header else request.cookies.get(COOKIE, "")
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return PlainTextResponse("A token is needed: open the address in the run's page.url.\n", 401, HEADERS)

    async def _page(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None and self.token and hmac.compare_digest(given.encode(), self.token.encode()):
            answer = RedirectResponse("./", 303, HEADERS)  # so that the token does not stay in the address bar
            answer.set_cookie(
                COOKIE, self.token, httponly=True, samesite="strict", secure=self.url.startswith("https:")
            )
            return answer
        return self._refused(request) or HTMLResponse(PAGE, headers=HEADERS)

    async def _state(self, request: Request) -> Response:
        refused = self._refused(request)
        return refused or Response(self._shown(), headers=HEADERS, media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        refused = self._refused(request)
        return refused or Response(generate_latest(self._registry), headers=HEADERS, media_type=CONTENT_TYPE_LATEST)

    async def _events(self, request: Request) -> Response:
        refused = self._refused(request)
        return refused or Stream(self._news(request), headers=HEADERS, media_type="text/event-stream")

    async def _news(self, request: Request) -> AsyncIterator[str]:
        seen, quiet = -1, 0.0
        while True:
            ending = self._server.should_exit
            if self.board.version != seen:
                seen, quiet = self.board.version, 0.0
                yield f"data: {self._shown()}\n\n"
            elif quiet >= QUIET_S:
                quiet = 0.0
                yield ": still here\n\n"
            if ending or await request.is_disconnected():
                return
            await asyncio.sleep(LOOK_S)
            quiet += LOOK_S

    def _shown(self) -> str:
        """Return the board's state as JSON; numbers that JSON does not have become null."""
        state = self.board.snapshot()
        try:
            return json.dumps(state, allow_nan=False)
        except ValueError:
            return json.dumps(json.loads(json.dumps(state), parse_constant=lambda _: None))


def serve(board: Board, folder: Path, host: str, port: int) -> Live | None:
    """Start the page and say where it is; None, with a warning, if that is not possible."""
    try:
        live = Live(board, folder, host, port)
    except (OSError, FedcrossError) as error:
        # Not the system's words: they would name a cause, should the run fail later of another one.
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another program, perhaps another run, has this port" if taken else error
        log(WARNING, "fedcross: no live page at %s:%s (%s); the run goes on without.", host, port, why)
        return None
    live.start()
    where = live.url.partition("?")[0]  # the log may have other readers than the page
    say(f"Live page: {where}" + (f" (with its token in {folder / ADDRESS})" if live.token else ""))
    return live
