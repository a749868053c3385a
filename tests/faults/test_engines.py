"""The two engines that start processes, against a toy app: results, failures, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcross.core.errors import FederationError
from fedcross.core.paths import import_root
from fedcross.engines import flower, ray, superlink
from fedcross.engines.processes import Family
from tests.support import toy_app
from tests.support.strays import left_behind

ENGINES = [
    pytest.param(superlink, marks=[pytest.mark.superlink, pytest.mark.slow], id="superlink"),
    pytest.param(ray, marks=[pytest.mark.ray, pytest.mark.slow], id="ray"),
]
ROOT = import_root()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return toy_app.write(tmp_path / "app")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that all processes of this test inherit."""
    value = secrets.token_hex(8)
    monkeypatch.setenv("FEDCROSS_TEST", value)
    return f"FEDCROSS_TEST={value}"


def launch(engine: ModuleType, *arguments: Any, **named: Any) -> None:
    """Run an app on the engine; Ray has one process for all clients, each of which takes four seconds to start."""
    if engine is ray:
        arguments += (ray.Params(cpus=1),)
    engine.launch(None, *arguments, **named)


def kept(work: Path) -> set[str]:
    """Return the suffixes of what an engine left in its work folder."""
    return {path.suffix for path in work.iterdir()}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_takes_part_and_nothing_is_left_behind(
    engine: ModuleType, app: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCROSS_PATH", "mine")
    output, lines = tmp_path / "replies.json", []
    overrides = shlex.join([str(output), "ask", "3", 'x="it\'s [1, 2]"', "y={a: b}"])
    launch(engine, overrides, 3, tmp_path / "work", app=app, sink=lines.append)
    replies = sorted(json.loads(output.read_text()), key=lambda reply: int(reply["partition"]))
    expected = {"partitions": 3, "overrides": overrides, "path": str(tmp_path / "mine")}
    assert replies == [{"partition": i, **expected} for i in range(3)]
    assert "the server is done" in lines
    assert left_behind(token) == []
    assert kept(tmp_path / "work") == {".log"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_fails_is_an_error_that_says_why(
    engine: ModuleType, app: Path, tmp_path: Path, token: str
) -> None:
    overrides = shlex.join([str(tmp_path / "out"), "fail", "2"])
    with pytest.raises(FederationError, match=r"finished:failed \(.*the server fails on purpose\)"):
        launch(engine, overrides, 2, tmp_path / "work", app=app, sink=lambda line: None)
    assert left_behind(token) == []
    assert kept(tmp_path / "work") == {".log"}


ENDS = [
    pytest.param(superlink, signal.SIGINT, marks=ENGINES[0].marks, id="superlink-SIGINT"),
    pytest.param(superlink, signal.SIGKILL, marks=ENGINES[0].marks, id="superlink-SIGKILL"),
    pytest.param(ray, signal.SIGTERM, marks=ENGINES[1].marks, id="ray-SIGTERM"),
    pytest.param(ray, signal.SIGKILL, marks=ENGINES[1].marks, id="ray-SIGKILL"),
]


@pytest.mark.parametrize(("engine", "number"), ENDS)
def test_nothing_is_left_behind_when_the_user_or_the_system_ends_a_run(
    engine: ModuleType, number: signal.Signals, app: Path, tmp_path: Path, token: str
) -> None:
    output = tmp_path / "out"
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # even if ignored where pytest runs
        "from pathlib import Path; from fedcross.engines import ray, superlink\n"
        f"{engine.__name__.split('.')[-1]}.launch(None, {shlex.join([str(output), 'hang', '2'])!r}, 2, "
        f"Path({str(tmp_path / 'work')!r}), app=Path({str(app)!r}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 600
        while not output.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout and process.stdout.read()
            time.sleep(0.1)
        assert len(left_behind(token)) > 2
        process.send_signal(number)
        process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    codes = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == codes[number]
    deadline = time.monotonic() + 300
    while left_behind(token) or kept(tmp_path / "work") != {".log"}:
        assert time.monotonic() < deadline, left_behind(token)
        time.sleep(0.1)


def started(family: Family, command: list[str]) -> int:
    """Start a Ray cluster and return its port. Whoever took the port in between makes it end: then another one."""
    deadline = time.monotonic() + 600
    for _ in range(3):
        [port] = flower.free_ports(1)
        head = family.start("ray-head", [*command, f"--port={port}"])
        while head.poll() is None:
            if "Ray runtime started" in family.log("ray-head").read_text():
                return port
            assert time.monotonic() < deadline, family.log("ray-head").read_text()
            time.sleep(0.2)
    raise family.failure("ray-head", "no Ray cluster")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray cluster that somebody else started, without any variable of this test."""
    with tempfile.TemporaryDirectory(prefix="fedcross-", ignore_cleanup_errors=True) as short:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDCROSS_")}
        command = [flower.executable("ray"), "start", "--head", "--block", "--num-cpus=1"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={short}"]
        with Family(tmp_path, {**environment, "RAY_USAGE_STATS_ENABLED": "0"}, [Path(short)]) as family:
            yield f"127.0.0.1:{started(family, [*command, '--disable-usage-stats'])}"
            assert family.ended() == []  # whoever joins a cluster leaves it running


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_joins_an_existing_cluster_and_leaves_it_alone(
    cluster: str, app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCROSS_PATH", str(tmp_path / "mine"))
    output = tmp_path / "replies.json"
    overrides = shlex.join([str(output), "ask", "3"])
    ray.launch(None, overrides, 3, tmp_path / "work", ray.Params(address=cluster), app=app, sink=lambda line: None)
    replies = sorted(json.loads(output.read_text()), key=lambda reply: int(reply["partition"]))
    expected = {"partitions": 3, "overrides": overrides, "path": str(tmp_path / "mine")}
    assert replies == [{"partition": i, **expected} for i in range(3)]
