"""A Flower Grid with worker processes on this machine: they train the clients of a round in parallel, one thread each.

Workers are forked after the data and all modules are loaded, so that they share that memory and import nothing. If a
fork is not safe (a GPU is in use, or the system is not Linux), workers start as new processes and load the data
themselves.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from flwr.app import Context, Error, Message
from flwr.common.logger import log

from fedcross.core.settings import DEVICE
from fedcross.engines.grid import LocalGrid, answer, identify
from fedcross.engines.job import Answer

#: Flower's code for a ClientApp whose process died.
CLIENT_APP_CRASHED = 8
_END_SECONDS = 5.0
#: How long one pull waits for a reply before it returns without any.
_PULL_SECONDS = 0.5


class WorkersGrid(LocalGrid):
    """A Flower Grid that calls `client` in `workers` processes.

    Each free worker gets the next message; clients with the most examples come first, so that no worker finishes a
    round late with one large client. The result does not depend on which worker trains a client.

    `sizes` is the work of each partition in any unit. Workers that are not forked import the ClientApp from `app_path`
    (``module:attribute``) and take `devices` in turn; without any they take the run's ``device``.
    """

    def __init__(
        self,
        client: Answer,
        clients: int,
        run_config: Mapping[str, str],
        workers: int,
        *,
        sizes: Sequence[int] = (),
        fork: bool = True,
        devices: Sequence[str] = (),
        app_path: str = "fedcross.client.app:app",
    ) -> None:
        super().__init__(client, clients, run_config)
        self._done: dict[str, Message] = {}  # replies that nobody has asked for yet
        self._sizes = sizes
        self._fork = fork and sys.platform == "linux"
        self._app_path = app_path
        self._devices = list(devices)
        self._waiting: list[tuple[int, int, Message]] = []
        self._order = 0
        self._pool: list[_Worker] = []
        for place in range(min(workers, clients)):
            self._pool.append(self._start(place))  # it closes the pipes of those before it

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue `messages` and give each idle worker one."""
        ids = list(super().push_messages(messages))
        for message_id in ids:
            message = self._queue.pop(message_id)
            partition = self.partitions[message.metadata.dst_node_id]
            size = self._sizes[partition] if partition < len(self._sizes) else 0
            heapq.heappush(self._waiting, (-size, self._order, message))
            self._order += 1
        self._hand_out()
        return ids

    def _pull(self, asked: set[str]) -> list[Message]:
        """Return the replies that have arrived and are not forgotten; wait a short time for the first one."""
        busy = {worker.pipe: worker for worker in self._pool if worker.message is not None}
        done: list[Any] = wait(list(busy), _PULL_SECONDS)
        for pipe in done:
            reply = self._take(busy[pipe])
            if busy[pipe].wanted:
                self._done[reply.metadata.reply_to_message_id] = reply
        self._hand_out()
        return [self._done.pop(one) for one in list(self._done) if one in asked]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop those of these messages that no worker has begun; the replies to the others are not returned."""
        forgotten = set(message_ids)
        self._done = {one: reply for one, reply in self._done.items() if one not in forgotten}
        self._waiting = [one for one in self._waiting if one[2].metadata.message_id not in forgotten]
        heapq.heapify(self._waiting)
        for worker in self._pool:
            if worker.message is not None and worker.message.metadata.message_id in forgotten:
                worker.wanted = False

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._pool:
            worker.process.terminate()
        for worker in self._pool:
            worker.end()
        self._pool = []

    def _hand_out(self) -> None:
        for place, worker in enumerate(self._pool):
            if worker.message is None and self._waiting:
                _, _, message = heapq.heappop(self._waiting)
                if not worker.process.is_alive():
                    worker.end()
                    worker = self._pool[place] = self._start(place)
                worker.give(message, self._context(message))

    def _take(self, worker: _Worker) -> Message:
        """Return the reply of a worker, or an error reply in its place if the worker died."""
        message: Any = worker.message
        worker.message = None
        try:
            reply, state = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(_END_SECONDS)
            reason = f"the worker process ended (exit code {worker.process.exitcode}) while it trained this client"
            log(WARNING, "client %s: %s", self.partitions[message.metadata.dst_node_id], reason)
            return Message(Error(CLIENT_APP_CRASHED, reason), reply_to=message)
        self._states[message.metadata.dst_node_id] = state
        return reply  # type: ignore[no-any-return]

    def _start(self, place: int) -> _Worker:
        context: Any = multiprocessing.get_context("fork" if self._fork else "spawn")
        here, there = context.Pipe()
        inherited = [worker.pipe for worker in self._pool] + [here] if self._fork else []
        device = "" if self._fork or not self._devices else self._devices[place % len(self._devices)]
        arguments = (there, inherited, self._client if self._fork else self._app_path, device)
        process = context.Process(target=_serve, args=arguments, name="fedcross-worker", daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork with threads. The thread here (progress display) holds no lock of a worker.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return _Worker(process, here)


@dataclass
class _Worker:
    """A worker process as the grid sees it; `wanted`: whether anybody waits for the reply to `message`."""

    process: BaseProcess
    pipe: Connection
    message: Message | None = None
    wanted: bool = True

    def give(self, message: Message, context: Context) -> None:
        """Send `message`; if the worker has died, :meth:`WorkersGrid._take` notices it."""
        self.message, self.wanted = message, True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((message, context))

    def end(self) -> None:
        """Wait until the process has ended; kill it after a time limit."""
        self.process.join(_END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, inherited: list[Connection], client: Answer | str, device: str) -> None:
    """Answer messages until the pipe closes. Runs in the worker; `device`, unless empty, is where it trains."""
    if device:
        os.environ[DEVICE] = device
    # Ctrl-C reaches the whole process group; the parent handles it and ends its workers with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    identify()
    if isinstance(client, str):
        module, _, attribute = client.partition(":")
        client = cast("Answer", getattr(importlib.import_module(module), attribute))
    with contextlib.suppress(EOFError, OSError):
        while True:
            message, context = pipe.recv()
            reply = answer(client, message, context)
            pipe.send((reply, context.state))


def _end_with_parent() -> None:
    """End this process when its parent has ended, even in the middle of a long training."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
