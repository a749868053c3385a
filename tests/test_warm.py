"""What ``tests.support.warm`` starts is as what ``subprocess`` starts."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing

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


@pytest.mark.parametrize("library", ["libraries", str(warm.ROOT), None])
def test_it_gets_what_it_is_given(tmp_path, library):
    own = {"PATH": os.environ["PATH"], "MINE": "räume"}
    if library:
        own["PYTHONPATH"] = str(tmp_path / library)
    told = []
    for run in (warm.run, real):
        done = run([sys.executable, "-c", TELL, "one", "two words"], cwd=tmp_path, env=own)
        assert (done.returncode, done.stderr) == (7, "said\n")
        told.append(json.loads(done.stdout))
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o666 & ~warm._umask()
        (tmp_path / "made").unlink()
    for one in told:
        one[2] = {name: value for name, value in one[2].items() if name in own}  # Python adds LC_CTYPE of its own
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


def test_a_zygote_that_has_died_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(warm, "_zygotes", {})
    process = warm.Process(["-c", "input()"])
    assert process.wait() == 1  # its standard input is empty
    own = warm.zygote()
    own._process.kill()
    with pytest.raises((RuntimeError, OSError)):
        warm.Process(["-c", ""])
    warm.end()
    assert own._process.returncode == -signal.SIGKILL
