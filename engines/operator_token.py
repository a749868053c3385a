"""The operator's token: the SuperLink's Control API takes no call without it (:mod:`engines.middleware`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcross.core.errors import StorageError
from fedcross.engines.middleware import HEADER

#: Environment variable that names the token's file.
VARIABLE = "FEDCROSS_OPERATOR_FILE"
#: Fewest characters of a token.
SHORTEST = 32


def read(variables: Mapping[str, str] | None = None) -> str:
    """Return the token in the file that :data:`VARIABLE` names; empty if it is not set.

    Raises
    ------
    StorageError
        If the file holds no token, or others on this machine can read it.
    """
    name = (os.environ if variables is None else variables).get(VARIABLE)
    if not name:
        return ""
    try:
        with Path(name).open(encoding="ascii") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StorageError(f"{VARIABLE}: the file cannot be read ({why}). Name keys/server/operator.token.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StorageError(f"{VARIABLE}={name}: mode {mode:o}, others can read it. Make a new token: chmod 600 {name}")
    if len(text) < SHORTEST or not text.isprintable():
        raise StorageError(f"{VARIABLE}={name}: no token. One has {SHORTEST} or more characters on one line.")
    return text


class Brings:
    """Adds the token to each call of a Control API client (an interceptor of Flower's HTTP clients)."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Make one call."""
        context.request.headers[HEADER] = self._token
        return call_next(context)
