"""Loops compiled with numba, kept on disk for the next process where a folder is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **flags: Any) -> Function:
    """Return `function`, compiled at its first call, without the GIL.

    numba keeps the machine code beside the source, or in the user's cache folder, for this CPU and this version of the
    source. Where neither is writable, each process compiles anew.
    """
    try:
        return cast(Function, numba.njit(nogil=True, cache=True, **flags)(function))
    except RuntimeError:  # numba's word for: no folder for the cache
        return cast(Function, numba.njit(nogil=True, **flags)(function))
