"""Flower's SuperNode, which asks for messages more often while a run is on.

::

    python -P engines/executor/program.py node --superlink HOST:PORT ...

Flower 1.41 and 1.42 have two pauses in the SuperNode's loop that no option changes: 3 s after a look that found no
message, and .5 s between two looks for the reply of its ClientApp. A round waits for the slowest device, so with three
of them the first pause alone costs 2.3 s in the mean. Here a pause is a tenth of the time since the device's last
message, within bounds: it costs a round a tenth of its length at most, and an idle device asks no more often than
Flower's does.

Its calls outlast passing errors of the SuperLink (:mod:`fleet`), and it forgets messages that it gives up
(:mod:`leftovers`). When its loop ends, whatever the reason, the process
ends: Flower's stays, because the thread of its own interface goes on, and nobody would start the device again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from logging import WARNING
from typing import Any, NoReturn

from flwr.common.logger import log

from . import leftovers, link
from .fleet import SHUT_OUT, endure

PROGRAM, LOOP = "flower-supernode", "flwr.supernode.start_client_internal"
#: Share of the time since the last message, and the least pause in seconds; the most is what Flower asks for.
SHARE, LEAST_S = 0.1, 0.2
#: Seconds between two looks for a reply.
LOOK_S = 0.05
#: From this length on, in seconds, a pause of Flower's is one between two questions for a message.
QUESTION_S = 1.0
#: Exit code if the SuperNode's loop, or one of its threads, has ended by itself.
ENDED = 5
#: Seconds until the process ends after a thread of it has failed; an end in good order takes less.
GRACE_S = 10.0


class Pauses:
    """Stands for the module ``time`` in the SuperNode's loop; only the pauses are other ones.

    Parameters
    ----------
    clock, sleep : callable
        Tell the time in seconds, and wait.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._last = -float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Wait at most `seconds`."""
        if seconds >= QUESTION_S:
            self._sleep(min(seconds, max(LEAST_S, SHARE * (self._clock() - self._last))))
        else:  # a message is being answered
            self._last = self._clock()
            self._sleep(min(seconds, LOOK_S))


def shorten() -> None:
    """Give the SuperNode's loop its :class:`Pauses`; a loop of another kind keeps Flower's, and the log says so."""
    loop = import_module(LOOP)
    if getattr(loop, "time", None) is not time:
        log(WARNING, "fedcross: %s has no pauses that are known; a round takes some seconds longer", LOOP)
        return
    loop.time = Pauses()  # type: ignore[attr-defined]


def end(why: str) -> NoReturn:
    """End this process at once with :data:`ENDED`, whatever threads are left."""
    print(f"fedcross: {why}; this process ends, so that the device is started again.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(ENDED)


def failed(told: threading.ExceptHookArgs) -> None:
    """End the process because a thread has ended with an error: without heartbeats, say, the device stays offline."""
    threading.__excepthook__(told)
    name = told.thread.name if told.thread else "a thread"
    last = threading.Timer(GRACE_S, end, [f"{name} of the SuperNode has failed ({told.exc_type.__name__})"])
    last.daemon = True  # an end in good order that is under way (status 401) comes first
    last.start()


def run(start: Callable[[], object]) -> NoReturn:
    """Run the SuperNode; end the process when it returns or fails. A request to end (SystemExit) takes its course.

    Flower takes a refused key for such a request; whoever started the device sees by the exit code that it is none.
    """
    threading.excepthook = failed
    why = "the SuperNode's loop has ended"
    try:
        start()
    except SystemExit:
        if not SHUT_OUT.is_set():
            raise
        why = "the SuperLink refuses this device's key"
    except Exception as error:  # noqa: BLE001 - whatever it is, the process must end
        traceback.print_exc()
        why += f" ({type(error).__name__})"
    end(why)


def main(arguments: list[str]) -> int:
    """Become the SuperNode with these arguments."""
    sys.argv = [PROGRAM, *arguments]
    [entry] = entry_points(group="console_scripts", name=PROGRAM)
    start: Callable[[], object] = entry.load()
    shorten()
    leftovers.attach()
    port = arguments[arguments.index("--port") + 1] if "--port" in arguments else ""
    endure(link.Answers(link.place(int(port)) if port.isdigit() else None).note)
    run(start)
