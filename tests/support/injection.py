"""A bench for faults in real processes: starts commands, reads what they say as it comes, tells what they named."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcross.core.causes import CAUSES, cause_of
from fedcross.core.trust.keys import KeyPair
from tests.support.network import lines
from tests.support.warm import Process

ROOT = Path(__file__).parents[2]
#: How long it may take until a fault is named, in seconds.
LIMIT_S = 30.0
#: How long a command may take in all on a busy machine.
PATIENCE_S = 300.0
#: What a command, doctor and the structured log say of causes.
SAID = re.compile(r"^Causes?: ([a-z_, ]+) \(|\"cause\": \"([a-z_]+)\"")
EXIT = {cause.name: cause.exit_code for cause in CAUSES}
#: A small run on this machine.
SMALL = (
    *("task=digits", "task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4"),
    *("clients_per_round=2", "train.epochs=1", "logger=none", "engine.workers=1", "device=cpu"),
)


@dataclass(frozen=True)
class Told:
    """What was named, how many seconds after the fault, and the exit code; `text` is all that was said."""

    names: tuple[str, ...]
    seconds: float
    code: int | None
    text: str

    def right(self, cause: str) -> bool:
        """Whether `cause`, and no other, was named in time, with the exit code that the table gives."""
        in_time = self.names == (cause,) and self.seconds <= LIMIT_S
        return in_time and (self.code == EXIT[cause] if EXIT[cause] else self.code != 0)


class Watched:
    """A process of which each line is kept, with the moment at which it came; `warm`: forked (tests.support.warm)."""

    def __init__(self, command: Sequence[str], folder: Path, *, warm: bool = False, **variables: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FEDCROSS_", "HYDRA_"))}
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "400", **variables}
        self.started = time.monotonic()
        self.process: subprocess.Popen[str] | Process
        if warm:
            self.process = Process(
                command, cwd=folder, env={**kept, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        else:
            self.process = subprocess.Popen(
                list(command), cwd=folder, env={**kept, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        self.said: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        """All that it has said."""
        return "\n".join(line for _, line in self.said)

    def first(self, seconds: float = PATIENCE_S) -> str:
        """Return its first line."""
        wait_until(lambda: bool(self.said), seconds)
        return self.said[0][1]

    def told(self, since: float, *, by_log: bool = False) -> Told:
        """Return what it names, counted from the moment `since`, when it has ended.

        With `by_log` it is a program that goes on, such as a device: the first line that the table knows counts.
        """
        if by_log:
            wait_until(lambda: any(cause_of(line) for _, line in self.said), LIMIT_S)
            named = next(((at, cause.name) for at, line in self.said if (cause := cause_of(line))), None)
            at, names = (named[0], (named[1],)) if named else (since + PATIENCE_S, ())
            return Told(names, at - since, None, self.text)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(10)
        for at, line in self.said:
            if found := SAID.search(line):
                names = tuple(one.strip() for one in (found[1] or found[2]).split(","))
                return Told(names, at - since, code, self.text)
        return Told((), time.monotonic() - since, code, self.text)

    def end(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Bench:
    """A folder for one fault, and the processes that it starts; a context manager that leaves none behind.

    `warm`: the ``fedcross`` commands find their libraries imported. For tests; the times of a table are of new ones.
    """

    def __init__(self, folder: Path, *, warm: bool = False) -> None:
        self.folder = folder
        self.warm = warm
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start(self, command: Sequence[str], *, warm: bool = False, **variables: str) -> Watched:
        """Start a program."""
        found = Watched(command, self.folder, warm=warm, **variables)
        self.stack.callback(found.end)
        return found

    def fedcross(self, *arguments: str, **variables: str) -> Watched:
        """Start the ``fedcross`` command; with variables that a library may read at its import, always a new one.

        The driver reads which GPUs there are for a process when that first asks for one, not when it imports torch.
        """
        warm = self.warm and all(name.startswith("FEDCROSS_") or name == "CUDA_VISIBLE_DEVICES" for name in variables)
        return self.start([sys.executable, "-m", "fedcross", *arguments], warm=warm, **variables)

    def ends(self, *arguments: str, **variables: str) -> Told:
        """Return what the command says of a fault that is there from its start on."""
        process = self.fedcross(*arguments, **variables)
        return process.told(process.started)

    def done(self, *arguments: str, **variables: str) -> None:
        """Run a command that must work, to prepare something."""
        process = self.fedcross(*arguments, **variables)
        told = process.told(process.started)
        assert told.code == 0, told.text

    def broken(self, output: Path, how: Callable[[], None], *arguments: str) -> Told:
        """Return what a run in `output` says when `how` breaks something after its second round."""
        process = self.fedcross(*SMALL, *arguments, "rounds=100000", f"output={output}")
        wait_until(lambda: len(lines(output)) >= 2 or process.process.poll() is not None, PATIENCE_S)
        assert process.process.poll() is None, process.text
        since = time.monotonic()
        how()
        return process.told(since)

    def answers(self, pair: KeyPair, status: int, ahead: int = 0, host: str = "127.0.0.1") -> int:
        """Start a TLS server that answers all with `status` and a clock `ahead` seconds off; return its port."""
        what = [host, str(pair.public), str(pair.private), str(status), str(ahead)]
        return int(self.start([sys.executable, "-m", "tests.support.tls_answers", *what]).first())


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until `holds`, at most so long; return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield number and command line of each process that `pid` has started, and of theirs."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(word) for path in children for word in path.read_text().split()}:
        with contextlib.suppress(OSError):
            yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            yield from descendants(child)
