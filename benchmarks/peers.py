"""A round of FedAvg: fedcross against other frameworks, each in an environment of its own, interleaved in one run.

::

    python -m benchmarks.peers --workload w            # installs the peers, writes docs/performance.md
    python -m benchmarks.peers --workload lenet5 --epochs 1 --repeats 2 --dry
    python -m benchmarks.peers --workload lenet5 --pfllib ~/PFLlib --lab ~/Federated_Learning

Each environment also uses the packages of this one (the same torch), after its own. A peer that cannot be installed or
does not answer is listed with the reason. Two peers are programs and not packages; they take part if a checkout is
named: PFLlib (github.com/TsingZ0/PFLlib, Apache-2.0) and the code of FedCross's authors
(github.com/mastlab-T3S/Federated_Learning, which states no licence: it is run where it lies, none of it is here).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.common import (
    WORKLOADS,
    Cell,
    Ours,
    Workload,
    images,
    interleaved,
    machine,
    metered,
    overrides,
    table,
    write_section,
)
from benchmarks.engine import REFERENCE, rounds_of
from benchmarks.loops import Loop

PEERS = {
    "pfl": ("pfl==0.6.0", "pfl-research, two processes"),
    "fluke": ("fluke-fl==0.8.1", "fluke, one process, two threads"),
    "blazefl": ("blazefl==2.0.3", "BlazeFL, one process, thread pool of two, without momentum"),
}
#: Peers of which a checkout is named: what their environment needs, and how the table calls them.
CHECKOUTS = {
    "pfllib": ("h5py==3.14.0", "PFLlib, one process, two threads, without momentum"),
    "lab": ("loguru==0.7.3", "FedCross's authors' code, one process, two threads"),
}
#: Torch's threads in each process of a peer, where it is not one.
THREADS = {"fluke": "2", "pfllib": "2", "lab": "2"}
#: BlazeFL asks for Python 3.12 but its code runs on 3.11; the comparison wants one Python and one torch for all.
OPTIONS = {"blazefl": ["--ignore-requires-python", "--no-deps"]}
ENVIRONMENTS = Path("~/.cache/fedcross/peers").expanduser()
PATIENCE_S = 600.0


class PeerError(Exception):
    """A peer that cannot run; the message says why."""


def environment(package: str, folder: Path, options: Sequence[str] = ()) -> Path:
    """Return the Python of an environment with `package`; create the environment if needed."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
        shared = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "shared.pth"
        shared.write_text(sysconfig.get_paths()["purelib"] + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options, package]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"not installed within {PATIENCE_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise PeerError(f"not installed: {_last(str(error.stderr))}") from error
    (folder / "ready").touch()
    return python


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no message"])[-1][:200]


class Peer:
    """Runs another framework's rounds one by one."""

    def __init__(self, name: str, python: Path, folder: Path, work: Workload, checkout: Path | None = None) -> None:
        self.home = folder / name
        self.home.mkdir()
        place = {} if checkout is None else {"checkout": str(checkout.resolve())}
        (self.home / "work.json").write_text(json.dumps(asdict(work) | place))
        (self.home / "data.npz").symlink_to(folder / "data.npz")
        for pipe in ("go", "done"):
            os.mkfifo(self.home / pipe)
        script = [str(Path(__file__).with_name("peer_rounds.py")), name, str(self.home)]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "pfl" else []
        threads = THREADS.get(name, "1")
        self.log = (self.home / "log").open("w+")
        self.process = subprocess.Popen(
            [str(python), *launch, *script],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": threads, "PFL_PYTORCH_DEVICE": "cpu", "WANDB_MODE": "disabled"},
            cwd=self.home,
        )
        # Opened for both directions, so that neither side waits for the other to open its end.
        self._go, self._done = (os.open(self.home / pipe, os.O_RDWR) for pipe in ("go", "done"))

    def round(self) -> Cell:
        """Do one round."""
        with metered(family(self.process.pid)) as cell:
            os.write(self._go, b"go\n")
            deadline = time.monotonic() + PATIENCE_S
            while not select.select([self._done], [], [], 0.5)[0]:
                if self.process.poll() is not None:
                    raise PeerError(f"ended: {self._reason()}")
                if time.monotonic() > deadline:
                    raise PeerError(f"no answer within {PATIENCE_S:.0f} s")
            os.read(self._done, 100)
        return cell

    def _reason(self) -> str:
        self.log.seek(0)
        return _last(self.log.read())

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            pids += family(int(child))
    return pids


def compare(work: Workload, repeats: int, checkouts: Mapping[str, Path]) -> str:
    """Return the table of one workload; `checkouts` says where those of :data:`CHECKOUTS` lie that take part."""
    wanted = PEERS | {key: CHECKOUTS[key] for key in checkouts}
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        os.environ["FEDCROSS_STATE"], os.environ["FEDCROSS_CACHE"] = str(folder / "state"), str(folder / "cache")
        images(work, folder)
        n = work.drawn * work.examples
        loop = Loop(work, torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,)), 2)
        ours = Ours(overrides(work, folder, folder / "f32"), 2)
        runners: dict[str, Callable[[], Cell]] = {REFERENCE: loop.round, "fedcross, two workers": rounds_of(ours)}
        peers: list[Peer] = []
        absent: dict[str, str] = {}
        try:
            for key, (package, title) in wanted.items():
                try:
                    python = environment(package, ENVIRONMENTS / key, OPTIONS.get(key, ()))
                    peer = Peer(key, python, folder, work, checkouts.get(key))
                    peers.append(peer)
                    peer.round()  # the first one imports and warms up
                    runners[title] = peer.round
                except PeerError as error:
                    absent[title] = str(error)
                    print(f"  {title}: {error}", flush=True)
            return table(interleaved(runners, repeats), REFERENCE, absent)
        finally:
            loop.close()
            ours.close()
            for each in peers:
                each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="w")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    for key, (_, title) in CHECKOUTS.items():
        parser.add_argument(f"--{key}", type=Path, metavar="FOLDER", help=f"a checkout: {title.partition(',')[0]}")
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = replace(WORKLOADS[given.workload], epochs=given.epochs)
    text = f"**{work.model}**, K={work.drawn}, E={work.epochs}, medians of {given.repeats} turns:\n\n"
    checkouts = {key: vars(given)[key] for key in CHECKOUTS if vars(given)[key] is not None}
    text += compare(work, given.repeats, checkouts)
    print(text)
    if not given.dry:
        section, head = ("peers", "## Beside other frameworks\n\n") if work.name == "w" else (f"peers {work.name}", "")
        write_section(section, f"{head}{machine()}\n\n{text}")


if __name__ == "__main__":
    main()
