"""README's line for shell completion: what it installs asks the command, and the command knows the names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
eval "$(fedcross -sc install=bash)"
complete -p fedcross
export COMP_LINE="fedcross $1"
export COMP_POINT=${#COMP_LINE}
COMP_WORDS=($COMP_LINE)
COMP_CWORD=1
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"), [("method=fedp", {"method=fedproc", "method=fedprox"}), ("rou", {"rounds="})]
)
def test_bash_completes_methods_and_settings(typed, offered):
    assert 'eval "$(fedcross -sc install=bash)"' in (ROOT / "README.md").read_text()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", typed],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
    )
    installed, *replies = run.stdout.splitlines()
    assert installed.endswith(" fedcross")
    assert set(" ".join(replies).split()) == offered
