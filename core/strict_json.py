"""JSON without ``NaN`` and ``Infinity``, which Python writes and most other readers refuse (RFC 8259, section 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

#: The only key of an object that stands for a number which JSON does not have.
_MARK = "$float"


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON; a float that is not finite becomes null. `options` are those of ``json.dumps``."""
    return _dumps(value, lambda _: None, options)


def dumps_exact(value: Any) -> str:
    """Return `value` as JSON from which :func:`loads_exact` makes an equal value, also if floats are not finite."""
    return _dumps(value, lambda number: {_MARK: repr(number)}, {})


def loads_exact(text: str) -> Any:
    """Return the value that :func:`dumps_exact` wrote; reads what older versions wrote too.

    Raises
    ------
    ValueError
        If `text` is no JSON.
    """
    return json.loads(text, object_hook=_number)


def _dumps(value: Any, stand_in: Callable[[float], Any], options: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare, so that values are searched only then
        return json.dumps(_replaced(value, stand_in), allow_nan=False, **options)


def _replaced(value: Any, stand_in: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(entry, stand_in) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(entry, stand_in) for entry in value]
    return stand_in(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(found: dict[str, Any]) -> Any:
    return float(found[_MARK]) if found.keys() == {_MARK} else found
