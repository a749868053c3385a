"""Whose calls the SuperLink's control interface takes: those with the operator's token.

Flower's interface takes a call from whoever reaches its port: any user of the machine that the server runs on, also
into a container's own network. It starts runs, whose code goes to the server and to all devices, stops them, and
registers keys. Where :data:`VARIABLE` names a file, the SuperLink refuses every call below :data:`CONTROL` that does
not bring the file's text (:mod:`entry`), and fedcross's own programs bring it. It travels within TLS only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

#: Variable: the file with the token.
VARIABLE = "FEDCROSS_OPERATOR_FILE"
HEADER, CONTROL = "fedcross-operator", "/v1/control/"
#: Fewest characters of a token.
SHORTEST = 32
WHY = f"this interface takes calls with the operator's token only (the file in {VARIABLE})"
#: What a call is told that brings a token, but not the one that the SuperLink has read.
ANOTHER = (
    "this call brings another operator's token than the SuperLink read at its start. If the token was made anew and "
    "the SuperLink not restarted since: restart it, until then the old one counts. If it was: start this program "
    f"again, with the new token. Else name the right file in {VARIABLE}"
)
#: Variable: the file with the live page's token (``server/page_variables.py``), an operator's own word perhaps; and its
#: fewest characters where others than this machine reach the page.
PAGE, PAGE_SHORTEST = "FEDCROSS_PAGE_TOKEN_FILE", 16
#: The folder, among a federation's keys, in which the token of each variable lies, and its file's name there; the file
#: of the gateway's token, beside the server's key; and whose these are, in words.
FOLDERS = {VARIABLE: "operator", PAGE: "page"}
TOKEN, GATEWAY = "token", "gateway.token"
OWNERS = {"operator": "the operator's token", "page": "the live page's token", "gateway": "the gateway's token"}
#: What begins or stands in a file that is something else than a token; a secret of bytes goes by its name.
SIGNS = {
    b"PRIVATE KEY-----": "a private key",
    b"-----BEGIN CERTIFICATE": "a certificate",
    b"SQLite format 3\0": "a database",
}
SECRET = "superexec.key"  # noqa: S105 - a file name
#: Bytes of a file in which such a sign is looked for.
LOOKED_AT = 2**16
NO_TEXT = "it is no text"


def token(variables: Mapping[str, str], variable: str = VARIABLE, shortest: int = SHORTEST) -> str:
    """Return the token in the file that `variable` names; empty if it is not set.

    Raises
    ------
    ValueError
        If there is no token of `shortest` or more characters in the file, or others on the machine can read it.
    """
    if not (name := variables.get(variable)):
        return ""
    refuse_text(name, variable)
    if found := other(path := Path(name), variable):
        raise ValueError(f"{variable}={name}: this is {found}. {right(variable)}")
    try:
        with path.open(encoding="ascii") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read().strip()
    except IsADirectoryError as error:
        raise ValueError(
            f"{variable}={name}: a folder. Name the file in it. If it is empty, Docker has made it for a file that was "
            "missing when a container started: rmdir it, and bring the file back."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{variable}={name}: this is no token, {NO_TEXT}. {right(variable)}") from error
    except OSError as error:
        raise ValueError(f"{variable}={name}: cannot be read ({error.strerror or error}).") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        again = "remove it, then fedcross deploy federation" if whose(path) else "and write it there"
        raise ValueError(
            f"{variable}={name}: mode {mode:o}, so others on this machine can use it. Make a new token if it may have "
            f"been read ({again}), else: chmod 600 {name}"
        )
    if len(text) < shortest or not text.isprintable():
        raise ValueError(f"{variable}={name}: this is no token; it has {shortest} or more characters on one line.")
    return text


def whose(path: Path) -> str:
    """Return whose token has its place in a federation's keys here: ``operator``, ``page``, ``gateway``; "" if none."""
    if path.name == GATEWAY:
        return "gateway"
    folder = path.parent.resolve().name
    return folder if path.name == TOKEN and folder in FOLDERS.values() else ""


def other(path: Path, variable: str = "") -> str:
    """Return what a file is that is no token ("a private key"), or none for `variable`; "" if that is not known."""
    if path.name == SECRET:
        return "the SuperExec's secret"
    with contextlib.suppress(OSError):
        if variable and path.is_dir() and not whose(path):
            return "a folder, not the file in it"
        if path.is_file():  # a pipe would wait for its writer
            with path.open("rb") as file:
                begin = file.read(LOOKED_AT)
            if found := next((kind for sign, kind in SIGNS.items() if sign in begin), ""):
                return found
    owner, own = whose(path), FOLDERS.get(variable)
    return OWNERS[owner] if own and owner not in ("", own) else ""


def right(variable: str) -> str:
    """Return which file `variable` is to name."""
    if (folder := FOLDERS.get(variable)) is None:  # the gateway's, which fedcross sets itself
        return f"Name the right file in {variable}."
    return f"Name {OWNERS[folder]} in {variable}: fedcross deploy federation keeps it in keys/{folder}/{TOKEN}."


def refuse_text(name: str, variable: str = VARIABLE) -> None:
    """Raise ValueError if `name`, which shall be a file's, can be the token itself; the error does not say it.

    What is there is a name, and what can be made in a folder that is there, other than the root or the current one. A
    short text may be a token too, of the page or of one who does not know how long it must be.
    """
    path = Path(name)
    try:
        names = (path.parent.name != "" and path.parent.is_dir()) or path.exists()
    except OSError as error:  # below a folder of somebody else; a token may be longer than a file's name can be
        names = path.is_absolute() and error.errno != errno.ENAMETOOLONG
    if not names:
        raise ValueError(
            f"{variable}=({len(name)} characters): there is no such file; is it the token itself? Give the path of the "
            "file that has it."
        )


class Brings:
    """Adds the token to each call of a client (an interceptor of Flower's HTTP clients)."""

    def __init__(self, own: str) -> None:
        self._token = own

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Make a call."""
        context.request.headers[HEADER] = self._token
        return call_next(context)


def bringing(variables: Mapping[str, str] | None = None) -> list[Brings]:
    """Return what a client of the control interface needs besides Flower's own; nothing without a token."""
    own = token(os.environ if variables is None else variables)
    return [Brings(own)] if own else []


def attach() -> None:
    """Have every client of the control interface in this process bring the token."""
    from flwr.supercore.control import ControlHttpClient

    made, more = ControlHttpClient.from_server_address.__func__, bringing()  # type: ignore[attr-defined]

    def with_token(cls: type[ControlHttpClient], *arguments: Any, **named: Any) -> Any:
        named["interceptors"] = [*named.get("interceptors", ()), *more]
        return made(cls, *arguments, **named)

    ControlHttpClient.from_server_address = classmethod(with_token)  # type: ignore[assignment]
