"""What the environment says of the live page: where this machine's runs have it, and which token opens it.

A page on another interface than the loopback one needs a token: ``FEDCROSS_PAGE_TOKEN``, or the content of the private
file that ``FEDCROSS_PAGE_TOKEN_FILE`` names, or a random one. It never stands among the settings, which travel to the
clients. Behind a proxy, ``FEDCROSS_PAGE_URL`` is the address under which people reach the page. What is wrong with a
variable is said without its value, which may be the token, in the wrong place.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

from fedcross.core.errors import ConfigError
from fedcross.engines.executor import operators

#: Environment variable: where this machine's runs serve their page, as ``HOST:PORT``.
PLACE = "FEDCROSS_PAGE"
#: Environment variables: the page's token, the file with it, and the page's address behind a proxy.
TOKEN, TOKEN_FILE, URL = "FEDCROSS_PAGE_TOKEN", operators.PAGE, "FEDCROSS_PAGE_URL"


def own_place() -> tuple[str, int] | None:
    """Return host and port of the page of every run that this machine serves; None if the environment names none.

    Raises
    ------
    ConfigError
        If ``FEDCROSS_PAGE`` is no address.
    """
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


def check() -> None:
    """Raise ConfigError if a variable of the page is wrong on this machine."""
    own = own_place()
    given_token(own[0] if own else "localhost")
    proxied()
