from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcross.core.errors import FederationError
from fedcross.core.paths import import_root
from fedcross.engines import processes
from fedcross.engines.processes import Family, marked, terminated_by_signal

# Writes its id, starts a child in a session of its own that ignores SIGTERM, and sleeps.
STUBBORN = """
import signal, subprocess, sys, time
child = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('child', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 300
    while not path.is_file() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{text!r} did not appear in {path}"
        time.sleep(0.02)


def test_no_process_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.3)
    with Family(tmp_path, dict(os.environ)) as family:
        family.start("parent", [sys.executable, "-c", STUBBORN])
        wait_for(family.log("parent"), "child")
        assert len(marked(family.mark)) == 2
    assert marked(family.mark) == []


def test_no_process_is_left_behind_after_an_error(tmp_path: Path) -> None:
    family = Family(tmp_path, dict(os.environ))

    def interrupted() -> None:
        with family:
            family.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert marked(family.mark) == []


def test_the_watchdog_cleans_up_after_sigkill(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    code = (
        "import os, sys, time; from pathlib import Path; from fedcross.engines.processes import Family\n"
        f"with Family(Path({str(tmp_path)!r}), dict(os.environ), [Path({str(tmp_path / 'keys')!r})]) as family:\n"
        "    family.start('sleeper', [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'])\n"
        "    print(family.mark, flush=True)\n"
        "    time.sleep(600)\n"
    )
    root = str(import_root())
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as victim:
        assert victim.stdout is not None
        mark = victim.stdout.readline().strip()
        wait_for(tmp_path / "sleeper.log", "1")
        assert len(marked(mark)) == 1
        victim.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 300
    while marked(mark) or (tmp_path / "keys").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ended_processes_and_their_logs(tmp_path: Path) -> None:
    with Family(tmp_path, dict(os.environ)) as family:
        bad = family.start("bad", [sys.executable, "-c", "import sys; print('\\033[91mreason\\033[0m'); sys.exit(3)"])
        assert bad.wait() == 3
        assert family.ended() == ["bad"]
        assert family.log("bad").stat().st_mode & 0o777 == 0o600
        message = str(family.failure("bad", "It ended."))
    assert message == f"It ended.\nEnd of {tmp_path / 'bad.log'}:\nreason"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with Family(tmp_path, {}) as family, pytest.raises(FederationError, match="cannot be started"):
        family.start("none", [str(tmp_path / "none")])


def test_sigterm_leaves_by_way_of_clean_up() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, terminated_by_signal():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_the_user_ignores_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_by_signal():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_a_log_is_its_last_30_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{i}\n" for i in range(40)))
    assert processes.tail(tmp_path / "log").split() == [str(i) for i in range(10, 40)]
    assert "empty" in processes.tail(tmp_path / "none")


def test_a_process_that_ends_is_started_again_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, then 1 s and 2 s after the last start; at 302 s only the start at 3 s is of the last 300 s."""
    now = [0.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(processes, "MOST_RESTARTS", 3)
    times = {0.0: True, 0.9: False, 1.0: True, 2.9: False, 3.0: True, 302.0: True, 303.0: True, 305.0: True}
    with Family(tmp_path, dict(os.environ)) as family:
        family.start("x", ["true"]).wait()
        for moment, starts in times.items():
            now[0] = moment
            assert family.revive() == ["x"] * starts, moment
            while not family.ended():
                time.sleep(0.01)
        now[0] = 310.0
        with pytest.raises(FederationError, match="3 times"):
            family.revive()
