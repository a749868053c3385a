"""Mutation testing: change one operator of a file at a time and see whether the tests of that file notice.

    python -m tests.support.mutation strategies/fedcross.py strategies/pool/mixing.py
    python -m tests.support.mutation --list strategies/fedcross.py           # which mutants there are
    python -m tests.support.mutation --only 93,94 strategies/fedcross.py     # some of them, by their numbers

A mutant is one change of one place (:mod:`tests.support.mutants`): a comparison, an arithmetic or logical operator, a
number plus or minus one, a truth value, a condition negated, a `return` of None, a call whose result nobody uses left
out. Strings, annotations and decorators stay, as do message texts; defaults of settings are tried with ``--defaults``.

How a mutant costs about a second: the tree is copied once per worker, the parent imports torch, Flower and the other
libraries (nothing of this project) and forks for every mutant. The child finds the mutated file *on disk*, so processes
that a test starts see it too. It runs the tests that execute the changed line, found by one traced run of the unchanged
file, the fastest first, until one fails; if none does, all tests of the file, for a cache may keep a line from running
a second time. A line that runs at import, or in another process, gets all tests at once.

Killed: a test fails, nothing can be imported, or the tests need ten times as long as without the mutant. Survived: all
tests pass. docs/mutation.md holds the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
#: Libraries that take long to import; whatever is missing is imported by the tests that need it.
HEAVY = ("numpy", "torch", "torch.func", "flwr.app", "flwr.clientapp", "flwr.serverapp", "hydra", "omegaconf")
HEAVY += ("pydantic", "scipy.optimize", "scipy.cluster.hierarchy", "sklearn.datasets", "hypothesis", "pytest", "numba")
HEAVY += ("scipy.stats", "sympy", "torch._dynamo", "torch.onnx")
#: Tests of a file beside those that are named after it (:func:`own_tests`).
MORE = {
    "strategies/fedcross.py": ["tests/strategies/test_propellers.py", "tests/strategies/test_start.py"],
    "strategies/pool/blocks.py": [
        "tests/strategies/pool/test_pool.py", "tests/strategies/pool/test_kernels.py",
        "tests/strategies/pool/test_similarity.py",
    ],
    "strategies/pool/kernels.py": ["tests/strategies/pool/test_pool.py", "tests/strategies/pool/test_passes.py"],
    "strategies/pool/passes.py": [
        "tests/strategies/test_masterpull.py", "tests/strategies/test_fedmut.py", "tests/strategies/test_fedmr.py",
    ],
    "strategies/pool/sliced.py": ["tests/strategies/test_fedcross_widths.py"],
    "strategies/parts/averaging.py": ["tests/strategies/test_fedavg.py"],
    "strategies/parts/objective.py": ["tests/client/test_trainer.py", "tests/strategies/test_fedavg.py"],
    "strategies/round/exchange.py": [
        "tests/strategies/test_start.py", "tests/strategies/round/test_spares.py",
        "tests/strategies/round/test_believed.py",
    ],
    "strategies/wire/records.py": ["tests/strategies/wire/test_safetensors_record.py"],
    "strategies/round/guard.py": [
        "tests/strategies/round/test_exchange.py", "tests/strategies/round/test_spares.py",
        "tests/strategies/round/test_believed.py", "tests/strategies/round/test_trail.py",
        "tests/strategies/round/test_rounds.py", "tests/strategies/round/test_client_faults.py",
        "tests/strategies/test_fedcross_async.py", "tests/faults/test_malformed.py",
    ],
    "strategies/round/base.py": [
        "tests/strategies/round/test_rounds.py", "tests/strategies/test_fedavg.py", "tests/strategies/test_start.py",
        "tests/strategies/round/test_exchange.py", "tests/strategies/round/test_spares.py",
        "tests/strategies/round/test_believed.py", "tests/strategies/defence/test_rules.py",
        "tests/strategies/round/test_trail.py", "tests/strategies/asynchronous/test_visits.py",
        "tests/server/test_reply_log.py", "tests/client/test_part_of_a_model.py", "tests/client/test_odd_weights.py",
    ],
    "client/trainer.py": [
        "tests/client/batched/test_trainer.py",
        "tests/strategies/test_fedsam.py",
    ],
    "client/flat_model.py": [
        "tests/client/test_trainer.py", "tests/strategies/test_scaffold.py", "tests/client/test_odd_weights.py",
        "tests/client/test_part_of_a_model.py", "tests/tasks/test_part.py",
        "tests/client/batched/test_trainer.py",
    ],
    "engines/workers.py": ["tests/engines/test_grid.py"],
    "strategies/round/cross_training.py": ["tests/strategies/test_fedct.py"],
    "strategies/parts/late.py": ["tests/strategies/test_fedsam.py", "tests/strategies/test_ima.py"],
    "strategies/asynchronous/pool.py": ["tests/strategies/test_fedcross_async.py", "tests/strategies/test_gitfl.py"],
    "strategies/round/sized_model.py": ["tests/strategies/test_heterofl.py", "tests/strategies/test_adaptivefl.py"],
    "client/batched/trainer.py": ["tests/client/batched/test_captured.py", "tests/client/test_device.py"],
    "client/batched/state.py": ["tests/client/batched/test_trainer.py", "tests/client/batched/test_captured.py"],
    "client/batched/stepper.py": [
        "tests/client/batched/test_trainer.py", "tests/client/batched/test_captured.py",
        "tests/strategies/test_fedsam.py",
    ],
    "client/batched/masked_norm.py": ["tests/client/batched/test_trainer.py", "tests/client/batched/test_captured.py"],
    "client/visit.py": [
        "tests/client/test_app.py", "tests/client/test_state.py", "tests/client/test_attack.py",
        "tests/client/test_local.py", "tests/client/test_privacy.py", "tests/strategies/test_centralized.py",
    ],
    "strategies/fedcross_async.py": ["tests/strategies/asynchronous/test_visits.py"],
    "engines/batched.py": ["tests/client/test_device.py"],
}  # fmt: skip
#: Files whose tests would compile numba's loops anew for each mutant: they run as plain Python instead.
INTERPRETED = {"strategies/pool/blocks.py", "strategies/pool/kernels.py", "strategies/pool/passes.py"}


def own_tests(file: str, root: Path = ROOT) -> list[str]:
    """Return the test files of a product file in the tree `root`: those named after it, and :data:`MORE`.

    Raises
    ------
    RuntimeError
        If there is none: pytest without a path would run the whole suite for every mutant.
    """
    path = Path(file)
    near = root / "tests" / path.parent
    named = sorted({*near.glob(f"test_{path.stem}.py"), *near.glob(f"test_{path.stem}_*.py")})
    if found := list(dict.fromkeys([*(str(one.relative_to(root)) for one in named), *MORE.get(file, [])])):
        return found
    raise RuntimeError(f"{file}: no tests/{path.parent}/test_{path.stem}*.py. Name its tests in MORE.")


class Seen:
    """A pytest plugin: which lines of `file` each test runs, how long it takes and whether it passes."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.now = ""
        self.known: dict[str, bool] = {}  # code's file name -> whether it is the file (a link's name differs)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if (ours := self.known.get(name)) is None:
            ours = self.known[name] = os.path.realpath(name) == self.file
        if not ours:
            return None
        self.lines[self.now].add(frame.f_lineno)
        return self.trace

    def pytest_runtest_setup(self, item: Any) -> None:
        self.now = item.nodeid
        sys.settrace(self.trace)
        import threading

        threading.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        if report.skipped:
            self.seconds.pop(report.nodeid)
        if report.when == "teardown":
            sys.settrace(None)


def in_child(shadow: Path, tests: list[str], limit: float, plugin: Seen | None = None) -> tuple[int, bool]:
    """Run `tests` with pytest in a fork of this process; return its exit status and whether time ran out."""
    child = os.fork()
    if child == 0:
        _child(shadow, tests, plugin)
    until = time.monotonic() + limit
    late = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if late := time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests left behind
    return os.waitstatus_to_exitcode(status), late


def _child(shadow: Path, tests: list[str], plugin: Seen | None) -> None:
    os.setsid()
    log = os.open(shadow / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(shadow)
    sys.path[:] = [str(shadow), *(one for one in sys.path if one not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(shadow)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fedcross")]:
        del sys.modules[name]
    code = 3
    try:
        import hypothesis
        import pytest

        hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutation")
        flags = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={shadow / '.tmp'}"]
        code = int(pytest.main([*flags, *([] if plugin else ["-x"]), *tests], [plugin] if plugin else []))
        if plugin:
            record = {"lines": {k: sorted(v) for k, v in plugin.lines.items()}, "seconds": plugin.seconds}
            (shadow / ".seen.json").write_text(json.dumps({**record, "failed": sorted(plugin.failed)}))
    finally:
        os._exit(code)


def copy_tree(place: Path) -> Path:
    """Copy what git tracks, and what it does not ignore, to `place`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, place / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return place


def write(target: Path, source: str, stamp: int) -> None:
    """Write a mutant with a time of its own, so that no compiled file passes for it."""
    target.write_text(source)
    os.utime(target, (stamp, stamp))


class Run:
    """All mutants of one file."""

    def __init__(
        self, file: str, shadows: list[Path], only: set[int], lines: set[int], everywhere: bool, sample: int = 0
    ) -> None:
        self.file, self.shadows = file, shadows
        self.source = (ROOT / file).read_text()
        self.mutants = [
            m
            for m in mutants(self.source)
            if (not only or m.number in only)
            and (not lines or m.line in lines)
            and (everywhere or only or m.lines is not None)
        ]
        if 0 < sample < len(self.mutants):
            self.mutants = sorted(random.Random(file).sample(self.mutants, sample), key=lambda m: m.number)
        self.tests = own_tests(file, shadows[0])

    def baseline(self) -> None:
        """Trace the unchanged file."""
        shadow = self.shadows[0]
        seen = Seen(os.path.realpath(shadow / self.file))
        code, late = in_child(shadow, self.tests, 900, seen)
        if code not in (0, 1) or late:
            raise RuntimeError(f"{self.file}: {self.tests} do not run: {(shadow / '.log').read_text()[-3000:]}")
        record = json.loads((shadow / ".seen.json").read_text())
        for nodeid in record["failed"]:
            print(f"  left out, fails without a mutant: {nodeid}", flush=True)
        kept = {k: v for k, v in record["seconds"].items() if k not in record["failed"]}
        self.order = sorted(kept, key=kept.__getitem__)
        self.seconds = kept
        self.lines = {k: set(v) for k, v in record["lines"].items()}

    def choose(self, mutant: Mutant) -> list[str]:
        """Return the tests for a mutant, the fastest first."""
        if mutant.lines is None:
            return self.order
        return [one for one in self.order if self.lines.get(one, set()) & mutant.lines] or self.order

    def worker(self, index: int) -> None:
        """Try every mutant whose turn is this worker's."""
        shadow = self.shadows[index]
        target = shadow / self.file
        with (shadow / ".result").open("w") as out:
            for mutant in self.mutants[index :: len(self.shadows)]:
                tests = self.choose(mutant)
                write(target, mutant.source, 1_000_000_000 + 2 * mutant.number)
                code, late = self.attempt(shadow, tests)
                if code == 0 and len(tests) < len(self.order):
                    code, late = self.attempt(shadow, self.order)
                out.write(json.dumps([mutant.number, "late" if late else code]) + "\n")
                out.flush()
        write(target, self.source, 999_999_999)

    def attempt(self, shadow: Path, tests: list[str]) -> tuple[int, bool]:
        """Run `tests` in at most ten times their time, and half a minute."""
        return in_child(shadow, tests, 30 + 10 * sum(self.seconds[one] for one in tests))

    def execute(self) -> dict[str, Any]:
        """Try all mutants and return the counts and the survivors."""
        started = time.monotonic()
        self.baseline()
        pids = []
        for index in range(len(self.shadows)):
            if not (pid := os.fork()):
                try:
                    self.worker(index)
                finally:
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        lines = [line for shadow in self.shadows for line in (shadow / ".result").read_text().splitlines()]
        codes = dict(json.loads(line) for line in lines)
        alive = [m for m in self.mutants if codes[m.number] == 0]
        odd = [m.number for m in self.mutants if codes[m.number] in (3, 5)]  # 4: the tests cannot be imported
        return {
            "file": self.file,
            "mutants": len(self.mutants),
            "killed": len(self.mutants) - len(alive),
            "late": sum(code == "late" for code in codes.values()),
            "unclear": odd,
            "seconds": round(time.monotonic() - started),
            "survivors": [(m.number, m.line, m.old, m.new) for m in alive],
        }


def survived(results: Path, file: str) -> set[int] | None:
    """Return the mutants of `file` that survived last in `results`; all (empty) if it has changed, None for none."""
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    last = [entry for entry in entries if entry["file"] == file][-1]
    now = {m.number: [m.number, m.line, m.old, m.new] for m in mutants((ROOT / file).read_text())}
    if any(now.get(one[0]) != one for one in last["survivors"]):
        return set()
    return {one[0] for one in last["survivors"]} or None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", default="", help="numbers of mutants, comma-separated")
    parser.add_argument("--lines", default="", help="lines of the file, comma-separated")
    parser.add_argument("--defaults", action="store_true", help="also what lies outside of functions: defaults, bounds")
    parser.add_argument("--sample", type=int, default=0, help="at most so many mutants of a file, always the same ones")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append one JSON line per file")
    parser.add_argument("--again", type=Path, help="such lines: try only those mutants that survived there")
    asked = parser.parse_args()
    only, at = ({int(one) for one in text.split(",") if one} for text in (asked.only, asked.lines))
    if asked.list:
        for file in asked.files:
            for m in mutants((ROOT / file).read_text()):
                print(f"{file}:{m.line} #{m.number}  {m.old}  ->  {m.new}")
        return
    if INTERPRETED & set(asked.files):
        os.environ["NUMBA_DISABLE_JIT"] = "1"  # numba reads it once, when it is imported
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        shadows = [copy_tree(Path(folder) / str(index)) for index in range(asked.workers)]
        for file in asked.files:
            try:
                again = survived(asked.again, file) if asked.again else only
                if again is None:
                    continue
                result = Run(file, shadows, again, at, asked.defaults, asked.sample).execute()
            except RuntimeError as error:
                print(error, flush=True)
                continue
            text = "{file}: {mutants} mutants, {killed} killed ({late} by time), {seconds} s, unclear {unclear}"
            print(text.format(**result), flush=True)
            for number, line, old, new in result["survivors"]:
                print(f"  {file}:{line} #{number}  {old}  ->  {new}", flush=True)
            if asked.out:
                with asked.out.open("a") as out:
                    out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
