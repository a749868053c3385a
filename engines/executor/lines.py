"""Keeps what callers write into the SuperLink's log short: one line, without control characters.

uvicorn logs the whole path of a request with its query, and Flower the words of a refusal, such as a content type of
16 kB. The gateway lets neither through; a SuperLink may also stand without one.

That a run is over when a device's call comes is no error, and Flower's lines on it are none here. That what came is no
request is said once a minute: anybody can send it as often as he likes.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from flwr.common.logger import FLOWER_LOGGER

from .fair import AWAY, current

#: Most characters of a path, and of what Flower says of a refused request.
PATH, REFUSAL = 128, 400
#: How Flower's line on a refused request begins.
REFUSED = re.compile(r"\[/[^]]*\]\[(ApiError|UnexpectedError):")

#: How Flower's lines begin on what a device sends for a run that is over (``over.CODE``).
OVER = re.compile(r"\[/v1/fleet/[^]]*\]\[ApiError:2007\]|Invalid run ID for Message")

#: uvicorn's line on what is no request, and the seconds between two of them.
STRAY, STRAY_S = "Invalid HTTP request received.", 60.0


def short(text: str, most: int) -> str:
    """Return the first `most` characters of `text`, printable, and how many more there are."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:most])
    return clean if len(text) <= most else f"{clean}... ({len(text) - most} more)"


def access(record: logging.LogRecord) -> bool:
    """Shorten the path of a line of uvicorn's; what the door answers has none, :mod:`fair` tells of it."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        record.args = (client, short(str(method), 16), short(str(path), PATH), *rest)
    return current.get() is not AWAY


def refusal(record: logging.LogRecord) -> bool:
    """Shorten Flower's line on a request that it refused; it is no error if the run is over."""
    if OVER.match(str(record.msg)[:PATH]):
        record.levelno, record.levelname = logging.INFO, "INFO"
    if REFUSED.match(str(record.msg)[:PATH]):
        record.msg, record.args = short(record.getMessage(), REFUSAL), ()
    return True


class Strays:
    """A filter that lets uvicorn's line on what is no request through once in :data:`STRAY_S` seconds, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next, self._more = clock, 0.0, 0

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written."""
        if record.msg != STRAY:
            return True
        if (now := self._clock()) < self._next:
            self._more += 1
            return False
        if self._more:
            record.msg = f"{STRAY} And {self._more} more since the last such line."
        self._next, self._more = now + STRAY_S, 0
        return True


def attach() -> None:
    """Shorten what the loggers of this process say."""
    logging.getLogger("uvicorn.error").addFilter(Strays())
    logging.getLogger("uvicorn.access").addFilter(access)
    FLOWER_LOGGER.addFilter(refusal)
