"""Whether and where a run's process serves the live page: the settings ``serve.*``, or what this machine says.

A run on a SuperLink is submitted from anywhere, but its page opens where its ServerApp runs. So that machine may say
``FEDCROSS_PAGE=HOST:PORT``: every run that it serves has a page there, whatever the run's settings are, as the compose
federation has it. Of two runs at once the second one finds the port taken, says so and goes on without a page.

A page on another interface than the loopback one needs a token: ``FEDCROSS_PAGE_TOKEN``, or the content of the private
file that ``FEDCROSS_PAGE_TOKEN_FILE`` names, or a random one. It never stands among the settings, which travel to the
clients. Behind a proxy, ``FEDCROSS_PAGE_URL`` is the address under which people reach the page. What is wrong with a
variable is said without its value, which may be the token, in the wrong place.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.common.logger import log

from fedcross.core.errors import ConfigError
from fedcross.core.extras import install
from fedcross.engines.executor import operators
from fedcross.server.board import Board

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: Environment variable: where this machine's runs serve their page, as ``HOST:PORT``.
PLACE = "FEDCROSS_PAGE"
#: Environment variables: the page's token, the file with it, and the page's address behind a proxy.
TOKEN, TOKEN_FILE, URL = "FEDCROSS_PAGE_TOKEN", operators.PAGE, "FEDCROSS_PAGE_URL"


def place(config: RunConfig) -> tuple[str, int] | None:
    """Return host and port of the run's page; None if it has none.

    Raises
    ------
    ConfigError
        If ``FEDCROSS_PAGE`` is no address.
    """
    own = _machines_own()
    return own or ((config.serve.host, config.serve.port) if config.serve.page else None)


def _machines_own() -> tuple[str, int] | None:
    """Return host and port that the environment names; None if it names none."""
    own = os.environ.get(PLACE, "")
    if not own:
        return None
    host, _, port = own.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{PLACE}=({len(own)} characters): where is the page? Give HOST:PORT, for example 127.0.0.1:8080."
        )
    return host.strip("[]"), int(port)


def given_token(host: str) -> str:
    """Return the token that the environment gives a page at `host`, or whose file it names; "" if it gives none.

    Raises
    ------
    ConfigError
        If the file cannot be read or others can read it, or the token is none that a browser sends back, or too short
        for an interface that others reach: the page must not open without its token.
    """
    least = 1 if is_loopback(host) else operators.PAGE_SHORTEST
    given, named = os.environ.get(TOKEN, ""), TOKEN
    if not given:
        named = TOKEN_FILE
        try:
            given = operators.token(os.environ, TOKEN_FILE, least)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    said = f"{named}: ({len(given)} characters):"
    with suppress(OSError):  # a token may be longer than a file's name can be
        if named == TOKEN and given and Path(given).is_file():
            raise ConfigError(f"{said} this is a file's name, and no token. Name the file in {TOKEN_FILE} instead.")
    if not given.isascii() or not given.isprintable() or given != given.strip():
        raise ConfigError(f"{said} a token is printable ASCII text, without a blank at its begin or end.")
    if given and len(given) < least:
        raise ConfigError(f"{said} a page at {host}, which others reach, needs a token of {least} or more characters.")
    return given


def proxied() -> str:
    """Return the page's address behind a proxy, "" if the environment names none; ConfigError if it is no address."""
    url = os.environ.get(URL, "")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{URL}=({len(url)} characters): this is no address. It begins with https:// or http://.")
    return url


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_variables() -> None:
    """Raise ConfigError if a variable of the page is wrong on this machine."""
    own = _machines_own()
    given_token(own[0] if own else "localhost")
    proxied()


def board_of(config: RunConfig) -> Board | None:
    """Return a board for the run's page to show; None if the run has no page."""
    return None if place(config) is None else Board(config.federation.deadline_s)


@contextmanager
def page_of(board: Board, config: RunConfig, folder: Path) -> Iterator[None]:
    """Serve the page of `board` inside the block; an error that ends the block is noted on it."""
    where = place(config)
    page = None
    if where is not None:
        try:
            from fedcross.server.live import serve
        except ImportError as error:  # FEDCROSS_PAGE where the extra is missing; serve.page=true is refused before
            log(WARNING, "fedcross: no live page (%s). %s", error, install("page"))
        else:
            page = serve(board, folder, *where)
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        board.note("run_failed", {"text": "interrupted" if interrupted else str(error) or type(error).__name__})
        raise
    finally:
        if page is not None:
            page.close()
