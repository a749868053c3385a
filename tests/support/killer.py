"""Kills a run with SIGKILL at a named point of a round, resumes it, and says what came out.

::

    python -m tests.support.killer FOLDER CASES [OVERRIDE ...]

`CASES` is JSON: a list of ``[point, round]``. One line of JSON per case is printed, after one for the run that nobody
interrupted. Production code knows nothing of this: the points are patched into a forked child.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedcross.engines.grid import LocalGrid
from fedcross.server import reply_log as replies_module
from fedcross.server.metrics import Metrics
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.session import Session
from fedcross.strategies.pool.pool import Pool
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.wire import records
from tests.support.federation import run, session

ROUNDS = 3
DRAWN = LAST_PULL = 3  # SMALL draws three clients


class Clock:
    """The round that is being done, and how often a point was passed in it."""

    def __init__(self, number: int) -> None:
        self.due, self.now, self.passed = number, 0, 0

    def kill(self, after: int = 1) -> None:
        """End this process at once if it is the round and the `after`-th time."""
        if self.now == self.due:
            self.passed += 1
            if self.passed == after:
                os.kill(os.getpid(), signal.SIGKILL)


#: What was patched, so that it can be put back where this process lives on.
PATCHED: list[tuple[Any, str, Any]] = []


def restore() -> None:
    """Take all patches back, the last one first."""
    while PATCHED:
        setattr(*PATCHED.pop())


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Let ``owner.name`` call `act` with its arguments first."""
    real = getattr(owner, name)
    PATCHED.append((owner, name, real))

    def patched(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, patched)


def after(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Let ``owner.name`` call `act` when it is done."""
    real = getattr(owner, name)
    PATCHED.append((owner, name, real))

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        act()
        return result

    setattr(owner, name, patched)


def half_a_line(clock: Clock) -> Callable[..., None]:
    """Return what writes half of a line of ``metrics.jsonl`` and dies."""

    def act(ledger: Metrics, entry: dict[str, Any]) -> None:
        if clock.now == clock.due:
            ledger.file._file.write(json.dumps(entry)[:40])
            ledger.file._file.flush()
            clock.kill()

    return act


def half_a_record(clock: Clock) -> Callable[..., None]:
    """Return what writes half of the record of the round's second reply and dies."""

    def act(replies: WriteAheadLog, current: Any, upload: Any) -> None:
        if clock.now == clock.due and clock.passed == 1:
            replies._file.write(replies_module.MAGIC + (10**6).to_bytes(8, "little") + b"half")
            replies._file.flush()
        clock.kill(2)

    return act


def at_rename(clock: Clock) -> Callable[..., None]:
    """Return what dies when a finished checkpoint is about to get its name."""

    def act(path: Path, target: Any) -> None:
        if "checkpoints" in Path(target).parts:
            clock.kill()

    return act


#: Point -> replies that had been accepted in the round it died in, whose clients must not be asked again.
ACCEPTED = {
    **{"before_sampling": 0, "after_sampling": 0, "push": 0, "first_pull": 0, "last_pull": 2, "validation": 1},
    **{"reply_half_logged": 1, "reply_logged": 2, "mixing": 3, "log_append": 3, "checkpoint_rename": 3},
    "checkpoint_written": 0,
}
#: Point -> what patches it in.
POINTS: dict[str, Callable[[Clock], None]] = {
    "before_sampling": lambda clock: before(Driver, "sampled", lambda *_: clock.kill()),
    "after_sampling": lambda clock: after(Driver, "sampled", clock.kill),
    "push": lambda clock: after(LocalGrid, "push_messages", clock.kill),
    "first_pull": lambda clock: after(LocalGrid, "pull_messages", clock.kill),
    "last_pull": lambda clock: after(LocalGrid, "pull_messages", lambda: clock.kill(LAST_PULL)),
    "validation": lambda clock: after(records, "check", lambda: clock.kill(2)),
    "reply_half_logged": lambda clock: before(WriteAheadLog, "accept", half_a_record(clock)),
    "reply_logged": lambda clock: after(WriteAheadLog, "accept", lambda: clock.kill(2)),
    "mixing": lambda clock: after(Pool, "mix", clock.kill),
    "log_append": lambda clock: before(Metrics, "round_finished", half_a_line(clock)),
    "checkpoint_rename": lambda clock: before(Path, "replace", at_rename(clock)),
    "checkpoint_written": lambda clock: after(Session, "_checkpoint", clock.kill),
}


def forked(act: Callable[[], None]) -> int:
    """Run `act` in a fork of this process and return its wait status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent sees the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def killed(folder: Path, overrides: list[str], point: str, number: int) -> None:
    """Run until SIGKILL."""
    clock = Clock(number)
    before(Session, "_round", lambda _, now: setattr(clock, "now", now))
    POINTS[point](clock)
    run(folder, *overrides)


def resumed(folder: Path, overrides: list[str]) -> None:
    """Continue to the end, and write down after which round this began."""
    ready, visits = session(folder, *overrides, f"resume={folder}"), []
    before(LocalGrid, "_carry_out", lambda _, message: visits.append(message))
    ready.execute()
    (folder / "resumed").write_text(json.dumps([ready.done, len(visits)]))


def digest(folder: Path) -> str:
    """Return the SHA-256 of the final model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Do all cases, one line of JSON each."""
    torch.set_num_threads(1)  # a fork must not wait for threads that it does not have
    root, cases, overrides = (
        Path(sys.argv[1]),
        json.loads(sys.argv[2]),
        [f"rounds={ROUNDS}", "checkpoint.log=true", *sys.argv[3:]],
    )
    os.environ["FEDCROSS_STATE"] = str(root / "whole" / "clients")
    run(root / "whole", *overrides)  # in this process, so that the forks find data and imports warm
    print(json.dumps({"digest": digest(root / "whole")}), flush=True)
    for index, (point, number) in enumerate(cases):
        folder = root / f"{index}-{point}"
        os.environ["FEDCROSS_STATE"] = str(folder / "clients")
        status = forked(lambda: killed(folder, overrides, point, number))  # noqa: B023 - done before the next turn
        told = {"point": point, "round": number, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}
        told["status"] = forked(lambda: resumed(folder, overrides))  # noqa: B023
        told["resumed_from"], told["visits"] = json.loads((folder / "resumed").read_text())
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        told["rounds"] = [line["round"] for line in lines]
        print(json.dumps({**told, "digest": digest(folder)}), flush=True)


if __name__ == "__main__":
    main()
