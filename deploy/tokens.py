"""The tokens of a federation: one line of text each, that opens an interface of the server to who brings it."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from fedcross.core.errors import StorageError
from fedcross.core.private_files import check_private, write_private
from fedcross.engines.executor import operators

#: The file of the gateway's token, beside the server's key. The others are called "token".
GATEWAY = operators.GATEWAY
#: Bytes of chance in a new token.
SIZE = 32
#: What a token is made of. HAProxy's configuration, in which the gateway's stands, reads quotes, $ and % otherwise.
_SIGNS = re.compile(r"[A-Za-z0-9._~+/=-]*")


def make(path: Path) -> None:
    """Write a new token."""
    write_private(path, secrets.token_urlsafe(SIZE).encode())


def check(path: Path, shortest: int = operators.SHORTEST, variable: str = "") -> str:
    """Return the token in a file that only its owner can read.

    Parameters
    ----------
    path : Path
        The file.
    shortest : int
        Fewest characters.
    variable : str
        The variable that names the file, in which another one can be wrong; "" for a file in its own place.

    Raises
    ------
    StorageError
        If it cannot be read, others can, it is something else (a key, a certificate, another's token), or it is not one
        line of `shortest` or more characters, letters, digits and ``._~+/=-``.
    """
    if found := operators.other(path, variable):
        if variable:
            raise StorageError(f"{path}: {variable} names {found}. {operators.right(variable)}")
        raise StorageError(
            f"{path}: {found}, in the place of a token. Move it to where it belongs: fedcross deploy federation makes "
            "a new token then."
        )
    check_private(path)
    try:
        text = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise StorageError(f"{path}: no token, {operators.NO_TEXT}. {_again(path, variable)}") from error
    except OSError as error:
        raise StorageError(f"{path}: this token cannot be read ({error}). {_again(path, variable)}") from error
    if len(text) < shortest or not _SIGNS.fullmatch(text):
        raise StorageError(
            f"{path}: no token, it is one line of {shortest} or more characters, which are letters, digits and "
            f"._~+/=- only. {_again(path, variable)}"
        )
    return text


def _again(path: Path, variable: str) -> str:
    """Return how to get a new token in place of a bad one; a file that stands elsewhere may be anything."""
    if variable and not operators.whose(path):
        return operators.right(variable)
    if path.name == GATEWAY:
        return (
            "Remove it: fedcross deploy federation (or fedcross deploy server) makes a new one. Then restart the "
            "SuperLink and the gateway."
        )
    return "Remove it: fedcross deploy federation makes a new one."
