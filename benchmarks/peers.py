"""A round of FedAvg: fedcross against a textbook loop and other frameworks, in turns.

Each framework runs :mod:`benchmarks.peer_rounds` in an environment of its own below the folder ``FEDCROSS_PEERS``,
which also uses the packages of this environment (the same torch). PFLlib and the FedCross authors' code are programs:
they take part if their checkouts lie in that folder. A framework that cannot run is listed with the reason.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import pandas as pd

from benchmarks.harness import Workload, in_turns, scratch, second_round

REFERENCE = "textbook loop, two processes"
FOLDER = Path(os.environ.get("FEDCROSS_PEERS", "~/.cache/fedcross/peers")).expanduser()
PATIENCE_S = 600.0


class Program(NamedTuple):
    """A contestant: what ``pip install`` gets, if it needs more; torch's threads per process; the checkout it needs."""

    title: str
    install: str = ""
    threads: int = 1
    checkout: str = ""


LOOPS = {"textbook": Program(REFERENCE), "tuned": Program("tuned loop, two processes")}
PEERS = {
    "pfl": Program("pfl-research, two processes", "pfl==0.6.0"),
    "fluke": Program("fluke, one process, two threads", "fluke-fl==0.8.1", 2),
    # BlazeFL asks for Python 3.12; its code runs on 3.11, the Python of the others.
    "blazefl": Program("BlazeFL, thread pool of two", "--ignore-requires-python --no-deps blazefl==2.0.3"),
    "pfllib": Program("PFLlib, one process, two threads", "h5py==3.14.0", 2, "PFLlib"),
    "lab": Program("the FedCross authors' code, one process, two threads", "", 2, "Federated_Learning"),
}


def environment(name: str, install: str) -> Path:
    """Return the Python of the environment of peer `name`; make the environment if needed.

    Raises
    ------
    RuntimeError
        If the packages cannot be installed.
    """
    folder = FOLDER / "env" / name
    python = folder / "bin" / "python"
    site = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    try:
        if not (ready := (folder / "ready").exists()):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True)
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        if not ready:
            command = [str(python), "-m", "pip", "install", "--quiet", *install.split()]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
            (folder / "ready").touch()
    except (subprocess.SubprocessError, OSError) as error:
        raise RuntimeError(f"not installed: {_reason(str(getattr(error, 'stderr', error)))}") from error
    return python


def _reason(text: str) -> str:
    """Return the last line of `text` that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines or ["no message"])[-1][:200]


class Peer:
    """The process of a contestant. A call does a round; it raises a RuntimeError with the reason if that cannot be."""

    def __init__(self, name: str, work: Workload, folder: Path) -> None:
        self.process: Any = None
        self.log = (folder / f"{name}.log").open("w+")
        self.problem = ""
        try:
            self._start(name, work, folder)
        except RuntimeError as error:
            self.problem = str(error)

    def _start(self, name: str, work: Workload, folder: Path) -> None:
        _, install, threads, checkout = (LOOPS | PEERS)[name]
        if not (place := FOLDER / checkout).is_dir() and checkout:
            raise RuntimeError(f"no checkout {checkout} in the folder FEDCROSS_PEERS")
        python = environment(name, install) if install else sys.executable
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "pfl" else []
        script = Path(__file__).with_name("peer_rounds.py")
        settings = {"OMP_NUM_THREADS": str(threads), "PFL_PYTORCH_DEVICE": "cpu", "WANDB_MODE": "disabled"}
        command = [*map(str, [python, *launch, script, name, folder, place]), json.dumps(asdict(work))]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | settings, cwd=folder, **streams)

    def __call__(self) -> float:
        """Do a round; return its seconds."""
        if self.problem:
            raise RuntimeError(self.problem)
        try:
            print(file=self.process.stdin, flush=True)
            if not select.select([self.process.stdout], [], [], PATIENCE_S)[0]:
                raise RuntimeError(f"no answer within {PATIENCE_S:.0f} s")
            return float(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            self.log.seek(0)
            raise RuntimeError(_reason(self.log.read())) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            try:
                self.process.communicate(timeout=10)  # the end of its input ends it
            except subprocess.TimeoutExpired:
                self.process.terminate()
                self.process.wait()
        self.log.close()


def compare(quick: bool, frameworks: bool) -> pd.DataFrame:
    """Return the table of LeNet-5 and the larger CNN: other `frameworks`, or a tuned loop and bfloat16."""
    tiny = Workload(clients=10, examples=50, drawn=2, epochs=1, batch=25)
    parts = []
    for work, turns in [(tiny, 1)] if quick else [(Workload(), 4), (Workload("cnn_w"), 3)]:
        with scratch(work) as folder, ExitStack() as stack:
            two = work.settings(folder, "engine.workers=2")
            contestants: dict[str, Callable[[], float]] = {
                title: stack.enter_context(Peer(name, work, folder))
                for name, (title, *_) in (LOOPS | PEERS).items()
                if name == "textbook" or (name in PEERS) == frameworks
            }
            for peer in contestants.values():  # a first round that does not count
                with suppress(RuntimeError):
                    peer()
            contestants["fedcross, two workers"] = second_round(*two)
            if not frameworks:
                contestants["fedcross, bfloat16"] = second_round(*two, "train.precision=bfloat16")
            parts.append(in_turns(contestants, turns, REFERENCE).assign(model=work.model))
    return pd.concat(parts)


measure = partial(compare, frameworks=True)
