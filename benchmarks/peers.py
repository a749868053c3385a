"""A round of FedAvg: fedcross against other frameworks, each in an environment of its own, in turns.

Each environment also uses the packages of this one (the same torch), after its own. A peer that cannot be installed or
fails is listed with the reason. :mod:`benchmarks.peer_rounds` runs in their environments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.engine import REFERENCE, loop
from benchmarks.harness import Workload, in_turns, scratch, seconds

PEERS = {
    "pfl": ("pfl==0.6.0", "pfl-research, two processes"),
    "fluke": ("fluke-fl==0.8.1", "fluke, one process, two threads"),
    "blazefl": ("blazefl==2.0.3", "BlazeFL, thread pool of two, without momentum"),
}
"""Peer -> its package, and how the table calls it."""
OPTIONS = {"blazefl": ["--ignore-requires-python", "--no-deps"]}
ENVIRONMENTS = Path("~/.cache/fedcross/peers").expanduser()
PATIENCE_S = 600.0


def environment(name: str) -> Path:
    """Return the Python of the environment of peer `name`; make the environment if needed.

    Raises
    ------
    RuntimeError
        If the package cannot be installed.
    """
    folder, package = ENVIRONMENTS / name, PEERS[name][0]
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    site = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/shared.pth"
    install = [str(python), "-m", "pip", "install", "--quiet", *OPTIONS.get(name, []), package]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        (folder / site).write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run(install, check=True, capture_output=True, timeout=PATIENCE_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise RuntimeError(f"not installed ({type(error).__name__})") from error
    (folder / "ready").touch()
    return python


def peer(name: str, work: Workload, folder: Path, rounds: int) -> Callable[[], float]:
    """Return a call that does `rounds` rounds in another framework and returns the median seconds of one."""

    def block() -> float:
        (folder / "work.json").write_text(json.dumps(asdict(work) | {"rounds": rounds + 1}))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "pfl" else []
        script = str(Path(__file__).with_name("peer_rounds.py"))
        threads = {"OMP_NUM_THREADS": "2" if name == "fluke" else "1", "PFL_PYTORCH_DEVICE": "cpu"}
        done = subprocess.run(
            [str(environment(name)), *launch, script, name, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            env={**os.environ, **threads},
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
        return float(np.median(json.loads((folder / "seconds.json").read_text())[1:]))

    return block


def measure(quick: bool) -> pd.DataFrame:
    """Return the table of one workload."""
    work = Workload(clients=10, examples=50, drawn=2, epochs=1) if quick else Workload("cnn_w")
    rounds, turns = (1, 1) if quick else (3, 3)
    with scratch(work) as folder:
        contestants = {
            REFERENCE: loop(work, rounds, tuned=False),
            "fedcross, two workers": seconds(work.settings(folder, "engine.workers=2"), rounds),
            **{title: peer(name, work, folder, rounds) for name, (_, title) in PEERS.items()},
        }
        return in_turns(contestants, turns, REFERENCE)
