"""The compose federation for real: image built, three clients, closed to strangers, taken down.

Needs an engine (``docker info``) and ``BASE_IMAGE`` where no registry can be reached. One federation serves all tests.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

from fedcross.server.launch import launch
from tests.support.containers import CLIENTS, IMAGE, Federation, docker

pytestmark = [pytest.mark.compose, pytest.mark.slow]

TASK = [
    "task=arrays",
    "task.classes=10",
    "task.shape=[1,8,8]",
    "task.mean=[0.5]",
    "task.std=[0.5]",
    "task.test_fraction=0",
]
RUN = [*TASK, "method=fedcross", "clients_per_round=3", "rounds=5", "seed=3", "logger=none"]
LOCAL = [*RUN, "partition=local", "federation.deadline_s=240"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    settings = {"FEDCROSS_RUN": " ".join([*LOCAL, "output=/outputs/first"])}
    with Federation(tmp_path_factory.mktemp("compose") / "clone", **settings) as running:
        running.compose("build", "setup")
        running.compose("up", "-d")
        yield running


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def seconds(lines: list[dict[str, float]]) -> list[float]:
    return [round(line["seconds"], 1) for line in lines]


def test_five_rounds_on_three_devices_give_the_local_model(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert docker("wait", federation.container("run")).strip() == "0"
    folder = federation.folder / "outputs" / "first"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["clients"], line["dropped"]) for line in lines] == [(3, 0)] * 5
    labels = f"label=com.docker.compose.project={federation.name}"
    assert len(docker("ps", "--all", "--quiet", "--filter", labels).split()) <= 8
    parts = [np.load(federation.folder / "data" / name / "data.npz") for name in CLIENTS]
    test = np.load(federation.folder / "data" / "server" / "data.npz")
    users = np.repeat(np.arange(3), [len(part["y"]) for part in parts])
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}
    np.savez(tmp_path / "data.npz", **arrays, users=users, x_test=test["x_test"], y_test=test["y_test"])
    monkeypatch.setenv("FEDCROSS_DATA", str(tmp_path))
    local = launch([*RUN, "partition=natural", "defence.enabled=true"], tmp_path / "local")
    print(f"seconds of the rounds: {seconds(lines)}; SHA-256 {sha(folder)}")
    assert sha(folder) == sha(local)


def test_page_and_metrics_are_behind_the_gateway_and_closed_without_the_token(federation: Federation) -> None:
    keys = {name: federation.python("superlink", f"print(open('/keys/server/{name}').read())") for name in KEYS}
    trust = ssl.create_default_context(cadata=keys["ca.crt"])

    def asked(path: str, known: bool = True) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {keys['page.token'].strip()}"} if known else {}
        request = urllib.request.Request(f"https://localhost:{federation.page_port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, ""

    assert asked("/metrics")[0] == 503  # no run is on
    run = federation.submit(*LOCAL, output="watched")
    run.wait_for_round(1)
    status, text = asked("/metrics")
    assert (status, "fedcross_devices_online 3\n" in text) == (200, True)
    assert {asked(path, known=False)[0] for path in ("/", "/state", "/metrics")} == {401}
    run.finish()


KEYS = ("ca.crt", "page.token")


def test_nobody_is_root_nothing_can_be_written_and_only_the_gateway_is_reached(federation: Federation) -> None:
    code = (
        "import os, socket\n"
        "status = open('/proc/self/status').read()\n"
        "assert os.getuid() == 10001 and 'CapEff:\\t0000000000000000' in status and 'NoNewPrivs:\\t1' in status\n"
        "for place in ('/etc', '/opt', '/usr', '/data', '/keys'):\n"
        "    try:\n"
        "        open(place + '/x', 'w')\n"
        "        raise SystemExit(place + ' can be written')\n"
        "    except OSError:\n"
        "        pass\n"
    )
    for service in ("superlink", "superexec", "gateway", *CLIENTS):
        federation.python(service, code)
    networks = federation.inspect("superlink")["NetworkSettings"]["Networks"]
    address = networks[f"{federation.name}_inner"]["IPAddress"]
    for host, port in ((address, 8000), ("superexec", 8080), ("1.1.1.1", 443)):
        tried = f"import socket\ntry: socket.create_connection(({host!r}, {port}), 3)\nexcept OSError: print('refused')"
        assert federation.python("client-1", tried) == "refused\n"


def test_a_stranger_is_refused_and_rounds_go_on(federation: Federation) -> None:
    assert federation.attack("paths")() == {"403": 10}
    before = memory(federation)
    assert federation.attack("large")() == {"413": 1, "411": 1}
    assert memory(federation) - before < 50 << 20
    for kind in ("slow", "flood", "idle"):
        run = federation.submit(*LOCAL, output=kind)
        run.wait_for_round(1)
        told = federation.attack(kind, 20)()
        lines = run.finish()
        print(f"{kind}: {told}; seconds of the rounds: {seconds(lines)}, lost {sum(line['dropped'] for line in lines)}")
        assert [line["dropped"] for line in lines] == [0] * 5
        if kind == "flood":
            assert set(told) <= {"503", "401", "closed"}
        assert told.get("most", 0) <= 48


def memory(federation: Federation) -> int:
    """Return the most resident memory that the SuperLink's processes have had, in bytes."""
    code = (
        "import pathlib, re\n"
        "texts = [p.read_text() for p in pathlib.Path('/proc').glob('[0-9]*/status')]\n"
        "print(max(int(n) for text in texts for n in re.findall(r'VmHWM:\\s+(\\d+)', text)) << 10)"
    )
    return int(federation.python("superlink", code))


@pytest.mark.parametrize("service", ["gateway", "client-2", "superlink", "superexec"])
def test_a_killed_container_comes_back_and_the_run_ends_by_itself(federation: Federation, service: str) -> None:
    reference = sha(federation.folder / "outputs" / "first")
    run = federation.submit(*LOCAL, output=f"kill-{service}")
    run.wait_for_round(2)
    killed = time.monotonic()
    subprocess.run(["kill", "-9", str(federation.inspect(service)["State"]["Pid"])], check=True)
    lines = run.finish(900)
    print(f"{service} killed: {time.monotonic() - killed:.0f} s to the end, seconds of the rounds: {seconds(lines)}")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert sha(run.folder) == reference


def test_one_stopped_device_of_three_does_not_end_a_run(federation: Federation) -> None:
    federation.compose("stop", "client-3")
    try:
        lines = federation.submit(*LOCAL, "rounds=3", output="stopped").finish()
    finally:
        federation.compose("start", "client-3")
    assert [line["dropped"] for line in lines] == [0] * 3


def test_a_run_is_stopped_and_resumed_with_more_rounds(federation: Federation) -> None:
    run = federation.submit(*LOCAL, "rounds=100", output="managed")
    run.wait_for_round(2)
    assert "is stopped" in federation.admin("stop", "last")
    assert run.process.wait(180) != 0
    more = len(run.lines()) + 3
    resume = ["fedcross", "deploy", "resume", "managed", f"rounds={more}"]
    assert "went on" in federation.compose("run", "--rm", "-T", "--no-deps", "run", *resume)
    assert [line["round"] for line in run.lines()] == list(range(1, more + 1))
    assert f"round {more}/{more}" in federation.admin("logs", "last")


def test_a_fourth_device_takes_part_from_its_bundle_until_it_is_revoked(federation: Federation, tmp_path: Path) -> None:
    bundle = tmp_path / "porch.tar.gz"
    add = ["run", "--rm", "-T", "--no-deps", "admin", "add-device", "porch", "--partition", "3", "--address"]
    with bundle.open("wb") as file:
        command = [*federation.command, *add, "gateway:8443"]
        subprocess.run(command, cwd=federation.folder, env=federation.environment, stdout=file, check=True)
    subprocess.run(["tar", "-xzf", bundle, "-C", tmp_path], check=True)
    (tmp_path / "porch" / "data" / "data.npz").write_bytes((federation.folder / "data/client-1/data.npz").read_bytes())
    for path in [tmp_path / "porch", *(tmp_path / "porch").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    device = tmp_path / "porch"
    start = ["fedcross", "deploy", "start", "device", "--keys", "/keys", "--superlink", "gateway:8443"]
    mounts = ["-v", f"{device}/keys:/keys:ro", "-v", f"{device}/data:/data:ro", "--network", f"{federation.name}_edge"]
    porch = docker("run", "--detach", *mounts, IMAGE, *start).strip()
    try:
        wait_for(federation, "4 registered, 4 online")
        lines = federation.submit(*LOCAL, "clients_per_round=4", "method.k=4", "rounds=2", output="fourth").finish()
        assert [(line["clients"], line["dropped"]) for line in lines] == [(4, 0)] * 2
        assert "is revoked" in federation.admin("revoke", "partition-3")
        wait_for(federation, "3 registered, 3 online, 1 revoked")
    finally:
        docker("rm", "--force", porch)


def wait_for(federation: Federation, words: str) -> None:
    deadline = time.monotonic() + 120
    while words not in (said := federation.admin("status")):
        assert time.monotonic() < deadline, said
        time.sleep(2)
