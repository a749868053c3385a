"""The worker: one process for one app bundle, which answers the messages that the supervisor hands it.

It speaks lines of JSON with the supervisor. A ClientApp may have three attributes for this process:

- ``stays_loaded``: true if it may answer several messages in one process. Without it the worker ends after one, as
  ``flwr-clientapp`` does.
- ``sound``: false once the process should end after this message (its GPU is in an unknown state, say).
- ``prepare(context)``: called after a reply has been sent, to load what the next message will need.

The worker ends when the supervisor closes the line, also in the middle of a message.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from logging import ERROR, INFO, WARNING
from typing import Any, Protocol

from flwr.app import Context, Message
from flwr.common.logger import log

#: Name of this program, by which an app knows that it runs here.
NAME = "fedcross-executor"
#: Most characters of an error in the log.
LINE = 200


class Visit(Protocol):
    """The calls of one task (:class:`flower_runtime.Visit`)."""

    def pull(self) -> tuple[Any, str]:
        """Return message, context, run and bundle, and the message's head as text."""
        ...

    def load(self, given: Any) -> Any:
        """Return the bundle's ClientApp."""
        ...

    def push(self, reply: Message) -> None:
        """Hand over the reply."""
        ...

    def finish(self, context: Context | None, fault: str = "") -> None:
        """End the task."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Worker:
    """Answers messages with one app.

    Parameters
    ----------
    visit : callable
        Token -> the calls of its task.
    error_reply : callable
        ``(message, exception) -> reply``.
    tell : callable
        Sends a JSON object to the supervisor.
    """

    def __init__(
        self,
        visit: Callable[[str], Visit],
        error_reply: Callable[[Message, Exception], Message],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._visit, self._error_reply, self._tell = visit, error_reply, tell
        self._app: Any = None
        self._bundle = ""

    def answer(self, token: str) -> bool:
        """Answer the message of the task with `token`; return whether this process can answer another one.

        Raises
        ------
        KeyboardInterrupt
            If the SuperNode has taken the task away while this process works on it.
        """
        self._tell({"taken": True})
        visit = self._visit(token)
        given: Any = None
        context: Context | None = None
        try:
            given, head = visit.pull()
            self._tell({"pulled": head, "seconds": given.message.metadata.ttl})
            context = given.context
            reply, fault = self._reply(visit, given)
            visit.push(reply)
            self._tell({"pushed": True})
        except KeyboardInterrupt:
            if given is not None:
                raise
            log(INFO, "fedcross: the SuperNode has given up a message before all of it had come (its run is over)")
            self._tell({"done": True, "stays": True})
            return True
        except Exception as error:
            # Nearly always because the run is over: Flower's SuperNode then forgets what belongs to it.
            why = f"{type(error).__name__}: {error}"
            line = " ".join(why.split())[:LINE]
            log(ERROR, "fedcross: a message was lost between SuperNode and worker (is its run over?): %s", line)
            visit.finish(context, why)
            raise
        else:
            visit.finish(context, fault)
        finally:
            visit.close()
        stays = bool(getattr(self._app, "stays_loaded", False))
        going_on = stays and not fault and bool(getattr(self._app, "sound", True))
        self._tell({"done": going_on, "stays": stays or self._app is None})
        if going_on:
            self._prepare(given.context)
        return going_on

    def _reply(self, visit: Visit, given: Any) -> tuple[Message, str]:
        """Return the reply, and the fault if it is an error."""
        try:
            if self._app is None:
                self._app, self._bundle = visit.load(given), given.fab.hash_str
            if given.fab.hash_str != self._bundle:
                raise RuntimeError("a worker for one app got a message for another one")
            reply: Message = self._app(message=given.message, context=given.context)
        except Exception as error:  # noqa: BLE001 - whatever an app raises becomes a reply, as in flwr-clientapp
            log(ERROR, "ClientApp raised an exception", exc_info=error)
            return self._error_reply(given.message, error), f"{type(error)}:<'{error}'>"
        return reply, ""

    def _prepare(self, context: Context) -> None:
        prepare = getattr(self._app, "prepare", None)
        if prepare is None:
            return
        try:
            prepare(context)
        except Exception as error:  # noqa: BLE001 - the next message raises it again, and reports it
            log(WARNING, "fedcross: loading the run failed: %s: %s", type(error).__name__, error)


def main(arguments: list[str]) -> int:
    """Answer tasks from the socket with descriptor ``arguments[0]`` at the SuperNode ``arguments[1]``."""
    from . import flower_runtime as runtime

    line = socket.socket(fileno=int(arguments[0]))
    address = arguments[1]
    sys.argv = [NAME]
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, tasks.put), daemon=True).start()

    def tell(said: dict[str, Any]) -> None:
        line.sendall(f"{json.dumps(said)}\n".encode())

    worker = Worker(lambda token: runtime.Visit(address, token), runtime.error_reply, tell)
    try:
        while worker.answer(str(json.loads(tasks.get())["token"])):
            pass
    except KeyboardInterrupt:
        log(WARNING, "fedcross: the SuperNode has taken this task away; the worker ends")
        return _leave(runtime.CLAIM_LOST)
    except Exception:  # noqa: BLE001 - logged where it was raised; the supervisor starts another worker
        return _leave(1)
    return _leave(0)


def _leave(code: int) -> int:
    """End this process at once: a library's threads cannot hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(line: socket.socket, put: Callable[[str], None]) -> None:
    """Pass on the supervisor's lines; end this process when it closes the line."""
    try:
        for text in line.makefile("r", encoding="utf-8"):
            put(text)
    except OSError:
        pass
    os._exit(0)
