"""Runs Flower's SuperNode and has its messages answered; ``python -m fedcross.engines.warm_device.launcher``."""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from logging import ERROR, INFO, WARNING
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Error, Message
from flwr.common.logger import log

from fedcross.engines import flower_private
from fedcross.engines.flower import executable
from fedcross.engines.warm_device.tasks import AwayError, GoneError, Task, Tasks

#: Seconds between two signs of life for a task in work; Flower's limit is 60.
ALIVE_S = 15.0
#: What the SuperNode logs when a message is complete. A task that is taken before that costs a second.
COMPLETE = b"Received successfully"
#: What it logs when it drops a message whose run is over. Its task stays, and the device would be one reply behind.
DROPPED = b"Ignoring message"
#: Seconds between two looks for a task without such a line, and while the SuperNode does not answer.
LOOK_S, AWAY_S = 10.0, 0.5
#: Seconds without a message after which a worker ends.
IDLE_S = 1800.0
#: Seconds that the SuperNode has to end after it was told to, or after its loop failed.
GRACE_S = 10.0
#: Flower's error code for a ClientApp whose process died. A message is tried so often.
CRASHED, TRIES = 8, 2
#: Exit code if the SuperNode failed without ending.
FAILED = 5


class Node:
    """The SuperNode's process. Its errors tell when its loop has failed: the process itself would stay.

    Parameters
    ----------
    command : sequence of str
        Starts it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=_end_with_parent
        )
        self._failed = self.stopped = self.stale = False
        self._received = threading.Event()
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        if self._process.stderr is None:
            return
        for line in self._process.stderr:
            self._failed = self._failed or line.startswith(b"Traceback (most recent call last)")
            self.stale = self.stale or DROPPED in line
            if COMPLETE in line or self.stale:
                self._received.set()
            with suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def wait(self, seconds: float) -> None:
        """Wait `seconds`, or until the SuperNode has received a message."""
        self._received.wait(seconds)
        self._received.clear()

    @property
    def ended(self) -> bool:
        """Whether it has ended or failed, was told to end, or must be started again."""
        return self._failed or self.stopped or self.stale or self._process.poll() is not None

    def stop(self, *_: int | FrameType | None) -> None:
        """Tell it to end (a signal handler of this process)."""
        self.stopped = True
        self._process.terminate()

    def end(self) -> int:
        """End it and return its exit code, as a shell does."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0 if self._failed else 0.1)
        self._process.terminate()
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(1.0)
        if self._failed and code == 0:
            return FAILED
        return code if code >= 0 else 128 - code


class Worker:
    """A process that answers messages of one bundle (:mod:`worker`).

    Parameters
    ----------
    bundle : bytes
        The app bundle.
    bundle_hash : str
        Its SHA-256.
    """

    def __init__(self, bundle: bytes, bundle_hash: str) -> None:
        self.bundle_hash = bundle_hash
        self._folder = Path(tempfile.mkdtemp(prefix="fedcross-app-"))
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            archive.extractall(self._folder)
        own, other = socket.socketpair()
        with other:
            script = str(Path(__file__).with_name("worker.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, str(other.fileno()), str(self._folder)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.line = Connection(own.detach())

    def end(self) -> int:
        """End the process at once and return its exit code; negative numbers are signals."""
        self.line.close()
        with suppress(subprocess.TimeoutExpired):
            return self._clean(self._process.wait(0.2))
        self._process.kill()
        return self._clean(self._process.wait())

    def _clean(self, code: int) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        return code


class Launcher:
    """Answers the tasks of one SuperNode with one worker at a time.

    Parameters
    ----------
    command : sequence of str
        Starts the SuperNode.
    tasks : Tasks
        Hands out its tasks.
    """

    def __init__(self, command: Sequence[str], tasks: Tasks) -> None:
        self._command, self._tasks = command, tasks
        self._node = Node(command)
        self._worker: Worker | None = None
        self._last = time.monotonic()

    def stop(self, *_: int | FrameType | None) -> None:
        """End the device (a signal handler)."""
        self._node.stop()

    def serve(self) -> int:
        """Answer messages until the SuperNode has ended; return its exit code. Restart it after a dropped message."""
        try:
            while True:
                while not self._node.ended:
                    self._step()
                stale, code = self._node.stale, self._node.end()
                if self._node.stopped or not stale:
                    return code
                log(INFO, "fedcross: the SuperNode starts again, because it has dropped a message")
                self._node = Node(self._command)
        finally:
            self._dismiss()

    def _step(self) -> None:
        """Answer the next message, or wait for one."""
        try:
            task = self._tasks.take()
            if task is not None:
                self._answer(task)
                self._last = time.monotonic()
            else:
                if time.monotonic() - self._last > IDLE_S:
                    self._dismiss()
                self._node.wait(LOOK_S)
        except AwayError:
            self._node.wait(AWAY_S)
        except GoneError as error:
            log(WARNING, "fedcross: a message is given up: %s", " ".join(str(error).split())[:200])
            self._node.stale = True

    def _answer(self, task: Task) -> None:
        try:
            for left in reversed(range(TRIES)):
                try:
                    reply, context, fault, stays = self._ask(task)
                    break
                except EOFError:
                    why = f"The ClientApp's process ended while it worked on a message (exit code {self._dismiss()})."
                    log(ERROR, "fedcross: %s", why)
                    if not left:
                        reply, context, fault, stays = (
                            Message(Error(CRASHED, why), reply_to=task.message),
                            task.context,
                            why,
                            True,
                        )
            task.reply(reply, context, fault)
            if not stays:
                self._dismiss()
        except GoneError:
            self._dismiss()
            raise
        finally:
            task.close()

    def _ask(self, task: Task) -> Any:
        """Return the worker's answer: reply, context, fault, and whether it stays. Raise EOFError if it died."""
        if self._worker is not None and self._worker.bundle_hash != task.bundle_hash:
            self._dismiss()
        if self._worker is None:
            self._worker = Worker(task.bundle, task.bundle_hash)
        line = self._worker.line
        try:
            line.send((task.message, task.context))
            sign = time.monotonic() + ALIVE_S
            while not line.poll(min(1.0, ALIVE_S)):
                if self._node.ended:
                    raise GoneError("the SuperNode has ended")
                if time.time() > task.message.metadata.created_at + task.message.metadata.ttl:
                    raise GoneError("its time is over")
                if time.monotonic() >= sign:
                    task.alive()
                    sign = time.monotonic() + ALIVE_S
            return line.recv()
        except OSError as error:
            raise EOFError from error

    def _dismiss(self) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else worker.end()


def main() -> int:
    """Run a device; return the SuperNode's exit code."""
    parser = argparse.ArgumentParser(description="Run Flower's SuperNode with a ClientApp process that stays.")
    parser.add_argument("--port", type=int, required=True, help="a free port of this machine's loopback interface")
    asked, options = parser.parse_known_args()
    command = [executable("flower-supernode"), *options, "--host", "127.0.0.1", "--port", str(asked.port)]
    if not flower_private.tried():
        log(
            WARNING,
            "fedcross: Flower %s is not known; it starts a process for each message",
            flower_private.installed(),
        )
        os.execv(command[0], command)  # noqa: S606 - a list of our own, no shell
    launcher = Launcher([*command, "--isolation", "process"], Tasks(f"127.0.0.1:{asked.port}"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, launcher.stop)
    return launcher.serve()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main())
