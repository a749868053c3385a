"""A process that has imported torch and Flower and nothing else, and forks a ready interpreter for each request.

``python -m tests.support.zygote CHANNEL``: `CHANNEL` is the number of a socket (:mod:`tests.support.warm` has the other
end). A request is JSON with three file descriptors (standard input, output, error); the answer is the number of the
new process, and, whenever one ends, its number and wait status.

It imports no module of fedcross, calls no operation of torch and starts no thread. What it forks therefore is a new
Python process in all but its imports of libraries; what these read of the environment when they are imported is that
of the tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

#: What a run imports besides fedcross. A name that is missing here costs time and changes nothing.
LIBRARIES = (
    *("torch", "torch.func", "torch.utils.data", "safetensors.torch", "safetensors.numpy", "numpy.random"),
    *("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.common", "grpc", "hydra", "omegaconf", "pydantic"),
    *("pydantic.types", "pydantic.functional_serializers", "cryptography.x509", "yaml", "rich.console", "filelock"),
    *("logging.config", "zoneinfo"),
)
#: The largest request: arguments and environment.
LARGEST = 1 << 20


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request until the other end is closed; return only in a new process, with its request."""
    ended, wake = socket.socketpair()
    for end in (ended, wake):
        end.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for what they started
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, ended], [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                ended.recv(4096)
            _collect(channel)
        if channel in ready:
            text, streams, _, _ = socket.recv_fds(channel, LARGEST, 3)
            if not text:
                os._exit(0)
            if (child := os.fork()) == 0:
                for end in (channel, ended, wake):
                    end.close()
                _own(streams)
                request: dict[str, Any] = json.loads(text)
                return request
            for stream in streams:
                os.close(stream)
            _tell(channel, "started", child)


def _collect(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(channel, "ended", pid, status)


def _tell(channel: socket.socket, *words: str | int) -> None:
    try:
        channel.send(json.dumps(words).encode())
    except OSError:  # the tests are gone
        os._exit(0)


def _own(streams: list[int]) -> None:
    """Give this new process its standard streams, and signals as a new process has them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def become(request: dict[str, Any]) -> NoReturn:
    """Be the process that `request` describes, and exit as Python does."""
    if request["start_new_session"]:
        os.setsid()
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    kind, what, *arguments = request["arguments"]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # The first is its own. A path of the environment is not there twice if a package's .pth names it too.
    given = [path for path in sys.path[1:] if path not in named]
    sys.path[:] = ["" if kind == "-c" else str(Path.cwd()), *named, *given]
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # it may have a package of that name of its own
    sys.argv[:] = ["-c" if kind == "-c" else "-m", *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), main.__dict__)
    sys.exit()


if __name__ == "__main__":
    CHANNEL = socket.socket(fileno=int(sys.argv[1]))
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    become(serve(CHANNEL))
