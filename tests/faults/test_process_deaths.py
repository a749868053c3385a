"""``kill -9`` of each process of a federation in the middle of a run: the run ends by itself with the same model."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcross.core.paths import import_root
from tests.support.strays import left_behind

pytestmark = [pytest.mark.slow, pytest.mark.superlink]
SETTINGS = (
    *("task=digits", "task.limit=200", "task.limit_test=100", "partition=iid", "partition.clients=3"),
    *("clients_per_round=3", "rounds=6", "seed=1", "logger=none", "checkpoint.every=1"),
)
#: Process -> words of its command line.
PROCESSES = {
    "ServerApp": ("flwr-serverapp",),
    "SuperLink": ("fedcross.engines.protected_superlink",),
    "SuperExec": ("flower-superexec",),
    "device": ("warm_device.launcher", "partition-id=1"),
    "SuperNode": ("flower-supernode", "partition-id=1", "--isolation"),
    "ClientApp": ("warm_device/worker.py",),
}
LIMIT_S = 900


def run(output: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedcross", *SETTINGS, f"output={output}", *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(import_root())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def digest(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the model that the same run has without a network."""
    output = tmp_path_factory.mktemp("local") / "run"
    said, _ = run(output, "engine.workers=1").communicate(timeout=LIMIT_S)
    assert (output / "result.json").exists(), said
    return digest(output)


def processes(words: tuple[str, ...], mark: str) -> Iterator[int]:
    """Yield the ids of this test's processes whose command lines have all of `words`."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ours = f"FEDCROSS_TEST={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if ours and entry.name.isdigit() and all(word in line for word in words):
                yield int(entry.name)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_run_ends_by_itself(name: str, tmp_path: Path, reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, mark = tmp_path / "run", str(tmp_path)
    monkeypatch.setenv("FEDCROSS_TEST", mark)
    process = run(output, "engine=superlink")
    try:
        rounds = output / "metrics.jsonl"
        wait_for(lambda: rounds.exists() and len(rounds.read_text().splitlines()) >= 2, process)
        killed = [*processes(PROCESSES[name], mark)][:1]
        assert killed
        os.kill(killed[0], signal.SIGKILL)
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, said[-3000:]
    assert digest(output) == reference, said[-3000:]
    assert left_behind(f"FEDCROSS_TEST={mark}", patience_s=60) == []
