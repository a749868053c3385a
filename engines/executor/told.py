"""What a device gets to know of a run: not the server's folders, addresses and other settings that are its own.

Flower tells a SuperNode that asks about a run its whole run config. Ours is the command line as one text
(``overrides``, ``core/run_config.py``), with ``output=`` and ``engine.address=``. A client composes its configuration
without what is the server's (``conf.schema.load_for_client``), so it does not need that.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from typing import Any

#: The key of the run config, ``core.run_config.OVERRIDES``.
OVERRIDES = "overrides"
#: ``conf.schema.SERVER_ONLY``, and Hydra's own settings, which name folders too.
SERVERS = frozenset(
    {
        *("output", "resume", "stop_at", "logger", "log", "serve", "checkpoint", "snapshots", "engine", "defence"),
        *("clock", "devices", "hydra"),
    }
)
#: In the place of nothing: an app that gets no overrides at all asks for typed keys instead. Clients leave it out.
NONE_LEFT = "engine=remote"


def for_a_device(text: str) -> str:
    """Return the overrides in `text` without the server's own; a text that cannot be split stays as it is."""
    try:
        given = shlex.split(text)
    except ValueError:
        return text
    kept = [one for one in given if one.lstrip("+~").split("=")[0].split(".")[0].split("/")[0] not in SERVERS]
    if len(kept) == len(given):
        return text
    return shlex.join(kept or [NONE_LEFT])


def without_the_servers(get_run: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler of a device's question about a run, which leaves out what is the server's alone."""

    @functools.wraps(get_run)
    def handler(request: Any, state: Any) -> Any:
        answer = get_run(request=request, state=state)
        config = answer.run.override_config
        if OVERRIDES in config and config[OVERRIDES].HasField("string"):
            config[OVERRIDES].string = for_a_device(config[OVERRIDES].string)
        return answer

    return handler
