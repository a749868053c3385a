"""A process that has imported torch and Flower and nothing else, and forks a ready interpreter for each request.

``python -m tests.support.zygote CHANNEL``: `CHANNEL` is the number of a socket (:mod:`tests.support.warm` has the other
end). A request is JSON with file descriptors (standard input, output, error, and perhaps more); the answer is the
number of the new process, and, whenever one ends, its number and wait status. On request it listens at a door as well,
where launchers (:mod:`tests.support.launcher`) ask for processes in the same way.

It imports no module of fedcross, calls no operation of torch and starts no thread. What it forks therefore is a new
Python process in all but its imports of libraries; what these read of the environment when they are imported is that
of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
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
#: What Flower's programs import besides; before the door opens.
PROGRAMS = (
    *("flwr.superlink.cli.flower_superlink", "flwr.superlink.cli.flwr_serverapp", "flwr.supercore.cli"),
    *("flwr.supernode.cli", "flwr.cli.app", "uvicorn", "scipy.optimize"),
)
#: The largest request: arguments and environment; and how many open files may come with it.
LARGEST, MOST_FILES = 1 << 20, 64


class Zygote:
    """Forks for the tests, and for the launchers that come to its door.

    Parameters
    ----------
    channel : socket
        To the tests.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._ended, self._wake = socket.socketpair()
        for end in (self._ended, self._wake):
            end.setblocking(False)
        self._door: socket.socket | None = None
        #: The line to each launcher, and the process for which it stands; 0: it has asked for none so far.
        self._launchers: dict[socket.socket, int] = {}

    def serve(self) -> dict[str, Any]:
        """Fork for each request until the tests close their end; return only in a new process, with its request."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for what they started
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        while True:
            listens = [self.channel, self._ended, *self._launchers, *([self._door] if self._door else [])]
            for line in select.select(listens, [], [])[0]:
                if line is self._ended:
                    with contextlib.suppress(BlockingIOError):
                        line.recv(4096)
                    self._collect()
                elif line is self._door:
                    self._launchers[line.accept()[0]] = 0
                elif (request := self._hear(line)) is not None:
                    return request

    def _hear(self, line: socket.socket) -> dict[str, Any] | None:
        """Do what is asked; return the request in the process that it has made."""
        try:
            text, files, _, _ = socket.recv_fds(line, LARGEST, MOST_FILES)
        except ConnectionError:
            text, files = b"", []
        if not text:
            self._gone(line)
            return None
        request: dict[str, Any] = json.loads(text)
        if "door" in request:
            self._open(request["door"])
            return None
        if (child := os.fork()) == 0:
            for end in (self.channel, self._ended, self._wake, self._door, *self._launchers):
                if end is not None:
                    end.close()
            _own(files, request["numbers"])
            return request
        for file in files:
            os.close(file)
        if line is not self.channel:
            self._launchers[line] = child
        _tell(line, "started", child)
        return None

    def _open(self, door: str) -> None:
        """Import what Flower's programs need, and listen for launchers."""
        for name in PROGRAMS:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(door)
        self._door.listen(128)
        _tell(self.channel, "open", 0)

    def _gone(self, line: socket.socket) -> None:
        """End with the tests, and kill the process of a launcher that was killed."""
        if line is self.channel:
            for pid in self._launchers.values():
                if pid:
                    os.kill(pid, signal.SIGKILL)
            os._exit(0)
        line.close()
        if pid := self._launchers.pop(line):
            os.kill(pid, signal.SIGKILL)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            lines = [line for line, number in self._launchers.items() if number == pid]
            for line in lines:
                self._launchers[line] = 0  # the number may come back
            _tell(lines[0] if lines else self.channel, "ended", pid, status)


def _tell(line: socket.socket, *words: str | int) -> None:
    with contextlib.suppress(OSError):  # whoever is gone shows when it is heard
        line.send(json.dumps(words).encode())


def _own(files: list[int], numbers: list[int]) -> None:
    """Give this new process its open files under their numbers, and signals as a new process has them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    above = 1 + max(*files, *numbers)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers):
        os.dup2(file, number)
        os.close(file)


def become(request: dict[str, Any]) -> NoReturn:
    """Be the process that `request` describes, and exit as Python does."""
    if request["start_new_session"]:
        os.setsid()
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = request["executable"]
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    own, kind, arguments = command(request["arguments"])
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # The first is its own. A path of the environment is not there twice if a package's .pth names it too.
    given = [path for path in sys.path[1:] if path not in named]
    sys.path[:] = [*own, *named, *given]
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # it may have a package of that name of its own
    what, *rest = arguments
    name = "python -c" if kind == "-c" else " ".join([Path(what).stem, *rest])
    Path("/proc/self/comm").write_text(name[:15])  # for ps and top; the command line stays the zygote's
    sys.argv[:] = [kind or what, *rest]
    try:
        _run(kind, what)
    except SystemExit as asked:
        _exit(asked.code)
    _exit(None)


def _run(kind: str, what: str) -> None:
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(what, run_name="__main__")


def _exit(code: str | int | None) -> NoReturn:
    """End as Python does, but for taking torch and Flower to pieces, which takes longer than most of what ran."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    number = code if isinstance(code, int) else int(code is not None)
    with contextlib.suppress(OSError, ValueError):
        if isinstance(code, str):
            print(code, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(number & 0xFF)


def command(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the first of the paths, if there is one, how the program is named (``-m``, ``-c``, ""), and the rest."""
    safe = words[0] == "-P"
    words = words[safe:]
    if words[0] not in ("-m", "-c"):
        return [] if safe else [str(Path(words[0]).resolve().parent)], "", words
    return [] if safe else ["" if words[0] == "-c" else str(Path.cwd())], words[0], words[1:]


if __name__ == "__main__":
    CHANNEL = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # what libraries make on import stays, and to search it again and again takes half a second
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    gc.enable()
    become(Zygote(CHANNEL).serve())
