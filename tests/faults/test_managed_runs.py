"""``fedcross deploy runs``, ``stop``, ``resume`` and ``logs`` on a real SuperLink, which starts again in between."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedcross.conf.compose import join
from fedcross.deploy.nodes import connect, listing
from fedcross.engines import guarded, remote
from fedcross.engines.processes import marked
from tests.support.command import main
from tests.support.killer import digest
from tests.support.network import CALM, ON_DISK, ROOT, SETTINGS, Network, lines, undisturbed, wait_for_rounds

pytestmark = [pytest.mark.superlink, pytest.mark.slow, pytest.mark.usefixtures("warm_start")]
PATIENCE_S = 600


def server_apps(network: Network) -> list[int]:
    """Return the processes of ServerApps of this network."""
    found = []
    for pid in marked(network.family.mark):
        try:
            command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        except OSError:
            continue
        if b"flwr-serverapp" in command:
            found.append(pid)
    return found


def wait_until(holds, seconds: float = PATIENCE_S, every: float = 0.2) -> None:
    """Return when `holds()`; a question to the SuperLink costs what a round does, so `every` is longer for those."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(every)


@contextlib.contextmanager
def telling(network: Network, where: list[str], *runs: str):
    """If what is inside fails, print the logs of processes and `runs`, which are gone afterwards."""
    try:
        yield
    except BaseException:
        for log in sorted(network.work.glob("*.log")):
            found = [line for line in log.read_text(errors="replace").splitlines() if "Push replies" not in line]
            print(f"--- {log}", *found[-60:], sep="\n")
        for asked in (["status"], *(["logs", run] for run in runs)):
            print("---", *asked)
            with contextlib.suppress(Exception):
                main(["deploy", *asked, *where])
        raise


def renew(network: Network) -> None:
    """Start the nodes again: the heartbeat of these light ones may have ended while their SuperLink was away.

    A SuperLink lets a key in again when it has not heard of its node for a while.
    """
    network.stop("nodes", signal.SIGKILL)
    with connect(f"127.0.0.1:{network.port}", network.authority.public) as client:
        wait_until(lambda: not any(node.status == "online" for node in listing(client)), every=2)
    network.start_nodes("nodes", [0, 1, 2], **CALM)


def test_a_run_outlives_a_restart_of_its_superlink_is_stopped_and_goes_on(tmp_path, capsys):
    """The watcher is what the compose file's service `run` is: it must end only with the run, and as the run does."""
    output = tmp_path / "run"
    with Network(tmp_path / "work", database=ON_DISK) as network, contextlib.ExitStack() as stack:
        where = ["--superlink", f"127.0.0.1:{network.port}", "--authority", str(network.authority.public)]
        network.start_nodes("nodes", [0, 1, 2], **CALM)
        engine = ["engine=remote", f"engine.address=127.0.0.1:{network.port}", f"engine.authority={where[3]}"]
        log = stack.enter_context((tmp_path / "watcher.log").open("w"))
        watcher = subprocess.Popen(
            [sys.executable, "-m", "fedcross", *SETTINGS, *engine, "rounds=100000", f"output={output}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_rounds(output, 2, PATIENCE_S)
            network.stop("superlink", signal.SIGKILL)
            network.processes["superlink"].wait()
            time.sleep(6)
            network.start_superlink()
            wait_for_rounds(output, len(lines(output)) + 2, PATIENCE_S)
            assert watcher.poll() is None
            assert "trying again" in (tmp_path / "watcher.log").read_text()

            assert main(["deploy", "runs", *where]) == 0
            shown = capsys.readouterr().out
            assert "running" in shown
            assert str(output) in shown
            assert server_apps(network)
            assert main(["deploy", "stop", "last", *where]) == 0
            stopped = time.monotonic()
            assert watcher.wait(PATIENCE_S) == 1
            assert "finished:stopped" in (tmp_path / "watcher.log").read_text()
            wait_until(lambda: not server_apps(network))
            print(f"the ServerApp's process ended {time.monotonic() - stopped:.1f} s after the stop")
        finally:
            watcher.kill()
            watcher.wait()
        renew(network)
        done = len(lines(output))
        assert main(["deploy", "stop", "last", *where]) == 1
        assert main(["deploy", "resume", "last", f"rounds={done + 2}", *where]) == 0
        assert len(lines(output)) == done + 2
        capsys.readouterr()
        assert main(["deploy", "logs", "last", *where]) == 0
        assert f"Finished: {done + 2} rounds" in capsys.readouterr().out
        found = digest(output)
    assert found == undisturbed(tmp_path / "whole", f"rounds={done + 2}")


def test_runs_wait_for_their_turn_and_one_is_stopped_without_the_others(tmp_path, capsys, monkeypatch):
    """Two runs at once: the third waits until the second is stopped, by its name; the first goes on meanwhile."""
    monkeypatch.setenv(guarded.RUNS, "2")
    with Network(tmp_path / "work") as network, contextlib.ExitStack() as stack:
        where = ["--superlink", f"127.0.0.1:{network.port}", "--authority", str(network.authority.public)]
        stack.enter_context(telling(network, where, "first", "second", "third"))
        params = remote.Params(address=where[1], authority=Path(where[3]))
        network.start_nodes("nodes", [0, 1, 2], **CALM)

        def submit(name: str, *more: str) -> None:
            text = join([*SETTINGS, *more, f"output={tmp_path / name}"])
            remote.submit(params, text, tmp_path / f"{name}-work", watch=False)

        def status() -> str:
            assert main(["deploy", "status", *where]) == 0
            return capsys.readouterr().out

        submit("first", "rounds=100000")
        # It waits for a fourth node: Flower's nodes, unlike our devices, hang in a message of a run that is over.
        submit("second", "partition.clients=4", "clients_per_round=4", "federation.wait_s=100000")
        submit("third", "rounds=2")
        wait_for_rounds(tmp_path / "first", 2, PATIENCE_S)
        wait_until((tmp_path / "second" / "metrics.jsonl").exists)
        assert "runs: 2 under way, 1 waiting" in (told := status())
        assert re.search(rf"pending +\d+  {tmp_path / 'third'} ", told)
        assert len(server_apps(network)) == 2
        assert not (tmp_path / "third").exists()

        assert main(["deploy", "stop", "second", *where]) == 0
        before = len(lines(tmp_path / "first"))
        wait_for_rounds(tmp_path / "third", 2, PATIENCE_S)
        wait_for_rounds(tmp_path / "first", before + 2, PATIENCE_S)
        wait_until(lambda: "1 completed, 1 stopped" in status(), every=1)
        told = status()
        assert "runs: 1 under way, 1 completed, 1 stopped" in told
        assert f"{tmp_path / 'first'} " in told
        assert main(["deploy", "stop", "second", *where]) == 1  # it is over already
        assert "it is over already" in capsys.readouterr().err
