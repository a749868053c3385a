"""What ``tests.support.warm`` starts is as what ``subprocess`` starts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.strays import left_behind

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sys.path, os.getsid(0) == os.getpid(),
                  os.getpgrp(), sorted(int(one) for one in os.listdir("/proc/self/fd"))[:3], __name__]))
print("said", file=sys.stderr)
open("made", "w").close()
sys.exit(7)
"""


def launched(command, **more):
    """Run a command with the program that stands for Python."""
    with warm.started_warm():
        return real([sys.executable, *command[1:]], **more)


@pytest.mark.parametrize("library", ["libraries", str(warm.ROOT), None])
@pytest.mark.parametrize("way", [warm.run, launched], ids=["run", "launched"])
def test_it_gets_what_it_is_given(tmp_path, library, way):
    own = {"PATH": os.environ["PATH"], "MINE": "räume"}
    if library:
        own["PYTHONPATH"] = str(tmp_path / library)
    told = []
    for run in (way, real):
        done = run([sys.executable, "-c", TELL, "one", "two words"], cwd=tmp_path, env=own)
        assert (done.returncode, done.stderr) == (7, "said\n")
        told.append(json.loads(done.stdout))
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o666 & ~warm._umask()
        (tmp_path / "made").unlink()
    for one in told:
        one[2] = {name: value for name, value in one[2].items() if name in own}  # Python adds LC_CTYPE of its own
    if way is launched:  # in a session of its own, to which the launcher passes signals on
        assert told[0].pop(4) is True
        assert told[1].pop(4) is False
        assert told[0].pop(4) != told[1].pop(4)
    assert told[0] == told[1]


def real(command, **more):
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def test_a_module_finds_its_own_code_and_only_libraries_are_there(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "own.py").write_text(
        "import sys\nprint(sys.argv[1:], 'torch' in sys.modules, [m for m in sys.modules if m[:8] == 'fedcross'])\n"
        "raise ValueError('at the end')\n"
    )
    done = warm.run(["-m", "tests.own", "x"], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, umask=0o027)
    assert done.returncode == 1
    assert done.stdout == "['x'] True []\n"
    assert done.stderr.splitlines()[-1] == "ValueError: at the end"


def test_signals_reach_it_and_its_end_is_told():
    code = "import time\ntry:\n    print('here', flush=True); time.sleep(600)\nexcept KeyboardInterrupt: print('ended')"
    for number, said, ended in ((signal.SIGINT, "ended\n", 0), (signal.SIGKILL, "", -9)):
        with closing(warm.Process(["-c", code], stdout=subprocess.PIPE, start_new_session=True)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            assert os.getsid(process.pid) == process.pid
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            # What ends the session of tests looks for what it left behind by this variable.
            assert left_behind(f"FEDCROSS_TESTS={os.environ['FEDCROSS_TESTS']}")
            process.send_signal(number)
            assert process.stdout.read() == said
            assert process.wait() == ended


LISTENS = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 3), (signal.SIGHUP, -signal.SIGHUP), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_what_happens_to_a_launcher_happens_to_its_process_and_back(number, code):
    with warm.started_warm():
        process = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        other = int(process.stdout.readline())
        assert other != process.pid
        os.killpg(process.pid, number)
        assert process.wait() == code
        assert process.stdout.read() == b""  # nobody holds it open any more
    deadline = time.monotonic() + 60
    while Path("/proc", str(other)).exists():  # killed by the zygote, which also waits for it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_launched_process_starts_is_launched_too_and_keeps_its_files():
    inner = "import os, sys; os.write(int(sys.argv[1]), b'torch' if 'torch' in sys.modules else b'nothing')"
    outer = (
        "import os, subprocess, sys\nreads, writes = os.pipe()\n"
        f"subprocess.run([sys.executable, '-P', '-c', {inner!r}, str(writes)], pass_fds=[writes], check=True)\n"
        "print(os.read(reads, 100).decode())"
    )
    assert launched(["python", "-c", outer]).stdout == "torch\n"


def test_a_program_of_flower_can_be_launched_and_anything_else_is_the_real_one():
    folder = warm.programs()
    done = real([folder / "flwr", "--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"Flower version: {version('flwr')}\n", "")
    assert (folder / "pytest").resolve() == Path(warm.PYTHON).with_name("pytest").resolve()
    assert {path.name for path in Path(warm.PYTHON).parent.iterdir()} <= {path.name for path in folder.iterdir()}
    before = sys.executable
    with warm.started_warm():
        assert sys.executable != before
    assert sys.executable == before == warm.PYTHON


def test_a_zygote_that_has_died_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(warm, "_zygotes", {})
    monkeypatch.setattr(warm, "_programs", {})
    process = warm.Process(["-c", "input()"])
    assert process.wait() == 1  # its standard input is empty
    own = warm.zygote()
    own._process.kill()
    with pytest.raises((RuntimeError, OSError)):
        warm.Process(["-c", ""])
    warm.end()
    assert own._process.returncode == -signal.SIGKILL
