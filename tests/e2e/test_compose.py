"""The compose federation for real: image built, three clients with data of their own, closed to strangers, taken down.

Needs an engine (``docker info``) and ``BASE_IMAGE`` where no registry can be reached. One federation serves all tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import httpx
import numpy as np
import pytest
from flwr.supercore.constant import TASK_TOKEN_HEADER

from fedcross.core.trust import signing
from fedcross.deploy.device import Device, new_client
from fedcross.engines.executor import entry, operators
from fedcross.server.launch import launch
from tests.support import containers, intruder
from tests.support.containers import CLIENTS, Federation

pytestmark = [pytest.mark.compose, pytest.mark.slow]

TASK = ["task=arrays", "task.classes=10", "task.shape=[1,28,28]", "task.test_fraction=0", "model=lenet5", "logger=none"]
METHOD = ["method=fedcross", "method.k=5", "clients_per_round=3", "train.epochs=2"]
RUN = [*TASK, *METHOD, "rounds=5", "seed=3"]
#: The authority's certificate in a client's container.
CA = "/keys/device/ca.crt"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    containers.deal(folder)
    return folder


@pytest.fixture(scope="module")
def federation(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    settings = {**containers.places(data), "FEDCROSS_RUN": " ".join([*RUN, "partition=local", "output=/outputs/first"])}
    with Federation(tmp_path_factory.mktemp("compose") / "clone", settings) as running:
        running.compose("up", "-d", "--build")
        yield running


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_five_rounds_on_three_devices_give_the_local_model(
    federation: Federation, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, log = federation.wait_for_run()
    assert code == 0, log
    folder = federation.folder / "outputs" / "first"
    assert [line["clients"] for line in lines(folder)] == [3] * 5
    assert [line["dropped"] for line in lines(folder)] == [0] * 5
    assert "round 5/5" in log
    monkeypatch.setenv("FEDCROSS_DATA", str(data / "together"))
    local = launch([*RUN, "partition=natural", "defence.enabled=true"], tmp_path / "local")  # as engine=remote has it
    print(f"SHA-256 of the final model: three containers {sha(folder)}, local engine {sha(local)}")
    assert sha(folder) == sha(local)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        pytest.param("model=mlp model.hidden=[512,512]", 1.05, id="2.7-MB-in-6-arrays"),
        # Flower spends two requests of 1 kB on every array: much for ten arrays of 25 kB.
        pytest.param("model=lenet5", 1.3, id="LeNet-5"),
    ],
)
def test_a_round_costs_two_models_per_client_on_the_wire(federation: Federation, model: str, most: float) -> None:
    """Everything that passes the clients' network interfaces, TCP and polling included, over the last four rounds."""
    overrides = [*TASK, *METHOD, model, "partition=local", "rounds=6", "seed=5", "train.examples=50"]
    processes = [federation.process(name) for name in CLIENTS]
    run = federation.submit(" ".join(overrides), f"wire-{most}")
    run.wait_for_round(2)
    before = sum(map(containers.interface_bytes, processes))
    run.wait_for_round(6)
    measured = (sum(map(containers.interface_bytes, processes)) - before) / 4
    run.finish()
    models = sum(line["bytes_down"] + line["bytes_up"] for line in run.lines()[2:]) / 4
    print(
        f"on the wire per round, {model}: {measured:.0f} bytes, {measured / models:.3f} x 2K models of {models / 6:.0f}"
    )
    assert measured <= most * models


def test_the_page_and_the_metrics_of_a_run_are_behind_the_gateway_and_closed_without_the_token(
    federation: Federation, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text(federation.python("superexec", "print(open('/keys/page/ca.crt').read())"))
    token = federation.python("superexec", "print(open('/keys/page/token').read(), end='')")
    trust = ssl.create_default_context(cafile=str(authority))

    def asked(path: str, *, known: bool = True, method: str = "GET") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if known else {}
        url = f"https://localhost:{federation.page_port}{path}"
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, ""

    assert asked("/metrics")[0] == 503  # no run is on
    run = federation.submit(" ".join([*TASK, *METHOD, "partition=local", "rounds=3", "seed=8"]), "watched")
    run.wait_for_round(1)
    status, text = asked("/metrics")
    assert (status, asked("/")[0], asked("/state")[0]) == (200, 200, 200)
    assert 'fedcross_run_info{method="fedcross"' in text
    assert "fedcross_devices_online 3.0" in text
    assert {asked(path, known=False)[0] for path in ("/", "/state", "/metrics", "/events", "/?token=x")} == {401}
    assert (asked("/docs")[0], asked("/state", method="POST")[0]) == (403, 405)
    code = (
        "import ssl,urllib.request as r,urllib.error as e\n"
        f"c=ssl.create_default_context(cafile={CA!r})\n"
        "try: r.urlopen('https://gateway:8444/state', context=c, timeout=9)\n"
        "except e.HTTPError as error: print(error.code)"
    )
    assert federation.python("client-1", code) == "401\n"
    assert federation.python("client-1", intruder.connects(["superexec"], 8080)) == "refused\n"
    run.finish()


def test_nobody_is_root_and_nothing_can_be_written(federation: Federation) -> None:
    code = (
        "import os\n"
        "assert os.getuid() == 10001 and os.getgid() == 10001\n"
        "status = open('/proc/self/status').read()\n"
        "assert 'CapEff:\\t0000000000000000' in status and 'NoNewPrivs:\\t1' in status\n"
        "for place in ('/etc', '/opt', '/usr', '/data', '/keys'):\n"
        "    try:\n"
        "        open(place + '/x', 'w')\n"
        "    except OSError:\n"
        "        continue\n"
        "    raise SystemExit(place + ' can be written')\n"
        "print('confined')"
    )
    for service in ("superlink", "superexec", "gateway", *CLIENTS):
        assert federation.python(service, code) == "confined\n"
    database = federation.python("superlink", "import os; print(oct(os.stat('/state/superlink.db').st_mode & 0o777))")
    assert database == "0o600\n"


def test_every_control_and_runtime_path_is_refused_from_a_clients_network(federation: Federation) -> None:
    paths = intruder.superlink_paths()
    assert len(paths) > 70
    answers = json.loads(federation.python("client-1", intruder.asks("gateway:8443", paths, CA)))
    refused = {path for path, status in answers.items() if status == 403}
    allowed = set(answers) - refused
    assert all(path.startswith("/v1/fleet/") for path in allowed)
    assert len(allowed) == 10
    assert {answers[path] for path in allowed} == {401}  # the caller has no registered key
    print(f"{len(refused)} of {len(answers)} paths refused by the gateway, {len(allowed)} by authentication")


def inner_address(federation: Federation) -> str:
    networks: dict[str, dict[str, str]] = federation.inspect("superlink")["NetworkSettings"]["Networks"]
    return next(network["IPAddress"] for name, network in networks.items() if name.endswith("_inner"))


def test_another_user_of_this_machine_reaches_the_superlink_and_cannot_drive_it(federation: Federation) -> None:
    paths = [path for path in intruder.superlink_paths() if path.startswith(operators.CONTROL)]
    assert len(paths) > 20
    token = federation.python("superexec", "print(open('/keys/operator/token').read(), end='')").strip()
    assert (
        federation.python("superlink", "import os; print(oct(os.stat('/keys/operator/token').st_mode))") == "0o100600\n"
    )
    for device in CLIENTS:
        assert not any("operator" in mount["Destination"] for mount in federation.inspect(device)["Mounts"])
    # A stranger does not mind whose certificate it is.
    with httpx.Client(base_url=f"https://{inner_address(federation)}:8000", verify=False) as client:

        def asked(path: str, **headers: str) -> httpx.Response:
            return client.post(path, headers={"content-type": "application/protobuf", **headers})

        assert {asked(path).status_code for path in paths} == {401}
        assert {asked(path, **{operators.HEADER: token[:-1]}).status_code for path in paths} == {401}
        assert asked(f"{operators.CONTROL}list-runs", **{operators.HEADER: token}).status_code == 200
        fleet = [path for path in intruder.superlink_paths() if path.startswith(entry.FLEET)]
        assert len(fleet) >= 10
        past = {asked(path, **{"x-forwarded-for": "203.0.113.5"}).text for path in fleet}
        assert past == {entry.NOT_THE_GATEWAY}
        programs = [path for path in intruder.superlink_paths() if path.startswith(entry.RUNTIME)]
        assert len(programs) > 10
        assert {asked(path, **{TASK_TOKEN_HEADER: "f" * entry.TOKEN_LENGTH}).text for path in programs} == {
            entry.NO_TASK
        }
        before = intruder.peak_rss(federation)
        for path in ("/v1/runtime/push-object", "/v1/fleet/push-object"):
            with contextlib.suppress(httpx.TransportError):  # it is closed in the middle
                assert client.post(path, content=iter([bytes(1 << 20)] * 600), timeout=60).status_code == 401
        assert intruder.peak_rss(federation) - before < 16 << 20
    lost = federation.compose(
        "run", "--rm", "-T", "--no-deps", "-e", f"{operators.VARIABLE}=", "admin", "runs", check=False
    )
    assert lost.returncode == 1
    assert operators.WHY in lost.stdout
    assert "Traceback" not in lost.stdout


def test_the_superlink_itself_cannot_be_reached_from_a_clients_network(federation: Federation) -> None:
    address = inner_address(federation)
    assert federation.python("client-1", intruder.connects(["superlink", address], 8000)) == "refused refused\n"
    assert federation.python("client-1", intruder.connects(["192.0.2.1", "1.1.1.1"], 443)) == "refused refused\n"


def test_strangers_are_refused_and_a_device_refuses_a_wrong_server(federation: Federation, tmp_path: Path) -> None:
    ours = federation.python("client-1", f"print(open({CA!r}).read())")
    other = signing.make_authority(tmp_path / "other").public.read_text()
    attempts = {
        "unregistered key": intruder.supernode("gateway:8443", ours),
        "wrong CA": intruder.supernode("gateway:8443", other),
        "expired": intruder.supernode("127.0.0.1:7443", *intruder.expired(tmp_path / "expired")),
        "plaintext": intruder.plaintext("gateway:8443"),
    }
    said = {kind: federation.python("client-1", code) for kind, code in attempts.items()}
    for kind, text in said.items():
        print(
            kind,
            *(line for line in text.splitlines() if "rror" in line or "ailed" in line or "answer" in line),
            sep="\n  ",
        )
    assert "Failed to activate SuperNode" in said["unregistered key"]
    assert "CERTIFICATE_VERIFY_FAILED" in said["wrong CA"]
    assert "certificate has expired" in said["expired"]
    assert said["plaintext"] == "no answer to plain HTTP\n"


def test_a_body_of_600_mib_is_refused_and_costs_the_superlink_nothing(federation: Federation) -> None:
    before = intruder.peak_rss(federation)
    statuses = [
        federation.python("client-1", intruder.large_body("gateway:8443", CA, 600 * 2**20, how)).strip()
        for how in ("announced", "chunked")
    ]
    growth = (intruder.peak_rss(federation) - before) / 2**20
    print(f"600 MiB: {statuses}, SuperLink's peak memory grew by {growth:.1f} MiB")
    assert statuses == ["413", "411"]
    assert growth < 50


@pytest.mark.parametrize("rate", [40, 1000])
def test_a_flood_from_a_devices_own_address_costs_it_no_slot(federation: Federation, rate: int) -> None:
    """Of another user of its machine, without a key. When addresses were known and not keys, 40 a second cut it off."""
    authority = federation.python("superlink", "print(open('/keys/server/ca.crt').read())")
    overrides = [*TASK, *METHOD, "partition=local", "rounds=8", "seed=9", "federation.deadline_s=60"]
    run = federation.submit(" ".join(overrides), f"flood-{rate}")
    run.wait_for_round(1)
    flood = intruder.flood("gateway:8443", authority, rate, 30)
    answers = Counter(json.loads(federation.python("client-1", flood, user="12345")))
    print(f"{rate} unsigned calls a second: {answers}; seconds of rounds: {[line['seconds'] for line in run.lines()]}")
    assert answers["401"] >= 100
    assert set(answers) <= {"401", "closed"}
    run.finish()
    assert [line["dropped"] for line in run.lines()] == [0] * 8


@pytest.mark.parametrize("seed", [0, 1], ids=["9-kB", "1-MiB"])
def test_80_slow_posts_without_credentials_do_not_stop_the_federation(federation: Federation, seed: int) -> None:
    """From one address: with 64 slots and no deadline for bodies they held all slots."""
    with containers.Stranger(federation, "slow", 45, 80, seed) as stranger:
        time.sleep(15)
        answers = json.loads(federation.python("client-1", intruder.calls("gateway:8443", CA, 10)))
        run = federation.submit(" ".join([*TASK, *METHOD, "partition=local", "rounds=1", "seed=7"]), f"slow-{seed}")
        run.finish()
        assert [line["dropped"] for line in run.lines()] == [0]
        told = stranger.end()
    print(f"80 slow bodies: {told}; seconds for a call of another device meanwhile: {answers}")
    assert max(answers) < 5
    assert told["most"] <= 32
    assert told["refused"] + told["cut"] >= 48


def test_2050_idle_sockets_from_one_address_cost_nobody_else_a_handshake(federation: Federation) -> None:
    with containers.Stranger(federation, "idle", 30, 2050) as stranger:
        told = stranger.line()
        answers = json.loads(federation.python("client-1", intruder.calls("gateway:8443", CA, 10)))
    print(f"2,050 idle sockets: {told}; seconds for a call of another device meanwhile: {answers}")
    assert max(answers) < 5
    assert told["held"] <= 32


def test_another_user_of_a_device_gets_no_task(federation: Federation) -> None:
    """The SuperNode's port for its ClientApps is open to all on the machine: without the secret it gives nothing."""
    said = federation.python("client-1", intruder.ACQUIRE, user="12345")
    print(said)
    assert said.startswith("refused: 401")
    secrets = [f"client-{i}" for i in (1, 2, 3)]
    code = "import hashlib; print(hashlib.sha256(open('/keys/device/superexec.key', 'rb').read()).hexdigest())"
    assert len({federation.python(name, code) for name in secrets}) == 3


def test_the_image_holds_no_pip_and_no_cuda_and_says_what_it_is(federation: Federation) -> None:
    code = (
        "import importlib.util, pathlib, torch\n"
        "names = [path.name for top in ('/opt', '/usr') for path in pathlib.Path(top).rglob('pip*')]\n"
        "assert not {'pip', 'pip3'} & {*names}, names\n"
        "assert importlib.util.find_spec('pip') is importlib.util.find_spec('ensurepip') is None\n"
        "print(torch.cuda.is_available(), torch.backends.cuda.is_built())"
    )
    assert federation.python("client-1", code) == "False False\n"
    for image, title in ((containers.IMAGE, "fedcross"), (f"{containers.IMAGE}-gateway", "fedcross-gateway")):
        labels = containers.image(image)["Config"]["Labels"]
        assert labels["org.opencontainers.image.title"] == title
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    whole = containers.image(containers.IMAGE)["Size"]
    ours = whole - containers.image(federation.base)["Size"]
    print(f"the image has {whole / 1e9:.2f} GB, {ours / 1e9:.2f} GB on top of its base")
    assert ours < 1.37e9  # with python:3.11-slim-bookworm (0.13 GB) less than 1.5 GB


def test_processors_are_limited_and_a_serverapp_has_less_memory_than_its_container(federation: Federation) -> None:
    for service in ("superlink", "superexec", "gateway", *CLIENTS):
        assert federation.inspect(service)["HostConfig"]["NanoCpus"] == 10**9, service
    assert federation.inspect("superexec")["HostConfig"]["Memory"] == 4 * 2**30
    code = (
        "import pathlib\n"
        "for entry in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if b'--runtime-api-address' in (entry / 'cmdline').read_bytes():\n"
        "        rows = (entry / 'limits').read_text().splitlines()\n"
        "        print(*(row.split()[3] for row in rows if row.startswith('Max data size')))"
    )
    assert {int(line) for line in federation.python("superexec", code).split()} == {3 * 2**30}


def test_a_revoked_device_is_out_and_a_registered_one_is_in(federation: Federation) -> None:
    key = "/keys/public/client-3-node.pub"
    assert "already registered" in federation.admin("register", key)
    federation.wait_for_nodes(3)
    assert "is revoked" in federation.admin("revoke", key)
    federation.wait_for_nodes(2)
    assert "no registered node has it" in federation.admin("revoke", key, check=False)
    assert "it was revoked" in federation.admin("register", key, check=False)


def test_a_fourth_device_from_its_bundle_takes_part_and_says_what_is_wrong_with_its_data(
    federation: Federation, data: Path, tmp_path: Path
) -> None:
    """Through the published port, as a device elsewhere would."""
    authority = tmp_path / "ca.crt"
    authority.write_text(federation.python("superlink", "print(open('/keys/server/ca.crt').read())"))
    bundle = new_client(Device("porch", f"{federation.address}:{federation.port}", 3, 4), authority, tmp_path)
    public = (bundle / "keys" / "porch-node.pub").read_text()
    own = tmp_path / "own"
    shutil.copytree(data / "client-3", own)
    assert "-: node " in federation.admin("register", "--partition", "3", "-", stdin=public)
    before = federation.admin("nodes").count("online")
    overrides = " ".join([*TASK, *METHOD, "partition=local", "rounds=2", "seed=6", f"clients_per_round={before + 1}"])
    with containers.Bundle(bundle, own) as device:
        federation.wait_for_nodes(before + 1)
        run = federation.submit(overrides, "fourth")
        run.finish()
        assert [line["dropped"] for line in run.lines()] == [0, 0]

        np.savez(own / "data.npz", x=np.zeros((4, 28, 30), np.uint8), y=np.arange(4))
        run = federation.submit(overrides, "refused")
        output = run.finish()
        assert [line["dropped"] for line in run.lines()] == [1, 1]
        said = "/data/data.npz: inputs of shape (1, 28, 30), this federation's are (1, 28, 28) (task.shape)"
        assert f"client_error: DataError: {said}" in output
        assert said in device.log()


def test_a_client_that_is_killed_is_missed_once_and_takes_part_again(federation: Federation) -> None:
    """Runs last: two devices are left, one of them is killed with ``kill -9`` in a round and starts again by itself."""
    overrides = [*TASK, *METHOD, "clients_per_round=2", "partition=local", "rounds=10", "seed=4"]
    run = federation.submit(" ".join(overrides), "second")
    run.wait_for_round(2)
    before = federation.process("client-2")
    os.kill(before, signal.SIGKILL)
    run.finish()
    clients = [line["clients"] for line in run.lines()]
    lost = [line["dropped"] for line in run.lines()]
    print(f"clients asked {clients}, lost {lost}")
    assert len(lost) == 10
    assert sum(lost) >= 1
    assert (clients[-1], lost[-1]) == (2, 0)
    assert federation.process("client-2") not in (0, before)
