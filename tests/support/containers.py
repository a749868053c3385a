"""A compose federation of this checkout, for tests: own project name, own copy of the tracked files, own data."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import fedcross
from fedcross.engines.flower import free_ports

ROOT = Path(fedcross.__file__).resolve().parent.parent
CLIENTS = ("client-1", "client-2", "client-3")
IMAGE = "fedcross-e2e"


def compose_command() -> list[str]:
    """Return what this machine calls compose: the plugin of v2, else 1.29's own program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


class Federation:
    """``docker compose up`` in a fresh copy of the project, as a context manager that takes everything down.

    Parameters
    ----------
    folder : Path
        Gets the copy of the project.
    settings : dict of str
        Variables for the compose file, see ``.env``.
    """

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.name = f"fedcross-{secrets.token_hex(4)}"
        self.port, self.page_port = free_ports(2)
        base = {"BASE_IMAGE": os.environ["BASE_IMAGE"]} if "BASE_IMAGE" in os.environ else {}
        # Where containers of other networks find this machine: its own address on the engine's bridge.
        subnet = docker("network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Subnet}}").stdout.strip()
        self.address = str(ipaddress.ip_network(subnet)[1])
        own = {
            "FEDCROSS_IMAGE": IMAGE,
            "FEDCROSS_BIND": self.address,
            "FEDCROSS_PORT": str(self.port),
            "FEDCROSS_PAGE_PORT": str(self.page_port),
            "FEDCROSS_NAMES": self.address,
            "COMPOSE_PROFILES": "cpu",
        }
        # Without BuildKit 1.29 and the engine agree on how to build.
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "0", **base, **own, **settings}
        self._compose = compose_command()

    def __enter__(self) -> Self:
        self.folder.mkdir()
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if folder := os.environ.get("FEDCROSS_COMPOSE_LOGS"):
            log = self.compose("logs", "--no-color", "--timestamps", check=False).stdout
            Path(folder, f"{self.name}.log").write_text(log, encoding="utf-8")
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def compose(self, *arguments: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run one compose command with the federation's settings; errors are part of its output."""
        done = subprocess.run(
            [*self._compose, "--project-name", self.name, *arguments],
            cwd=self.folder, env=self.environment, text=True, input=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(arguments)}\n{done.stdout[-6000:]}"
        return done

    def admin(self, *arguments: str, check: bool = True, stdin: str = "") -> str:
        """Run ``fedcross deploy`` at the server and return what it says."""
        command = ["run", "--rm", "-T", "--no-deps", "admin", *arguments]
        return self.compose(*command, check=check, stdin=stdin).stdout

    def wait_for_nodes(self, count: int, seconds: float = 180) -> None:
        """Wait until so many devices are online."""
        deadline = time.monotonic() + seconds
        while (listed := self.admin("nodes")).count("online") != count:
            assert time.monotonic() < deadline, listed
            time.sleep(2)

    def container(self, service: str) -> str:
        """Return the id of the service's container, running or not."""
        labels = {"project": self.name, "service": service, "oneoff": "False"}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return docker("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()[0]

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of the service's container."""
        text = docker("inspect", self.container(service)).stdout
        found: dict[str, Any] = json.loads(text)[0]
        return found

    @property
    def base(self) -> str:
        """The image on which the federation's images stand."""
        if "BASE_IMAGE" in self.environment:
            return self.environment["BASE_IMAGE"]
        lines = (self.folder / "Dockerfile").read_text().splitlines()
        return next(line.removeprefix("ARG BASE_IMAGE=") for line in lines if line.startswith("ARG BASE_IMAGE="))

    def python(self, service: str, code: str, user: str = "") -> str:
        """Run Python code in the service's container, as another user if one is named; return what it prints."""
        own = ["--user", user] if user else []
        done = docker("exec", "-i", *own, self.container(service), "python3", "-", stdin=code, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for_run(self, seconds: float = 900) -> tuple[int, str]:
        """Wait until the service ``run`` has ended; return its exit code and log."""
        deadline = time.monotonic() + seconds
        while (state := self.inspect("run")["State"])["Status"] not in ("exited", "dead"):
            assert time.monotonic() < deadline, self.compose("logs", "--tail=40", check=False).stdout
            time.sleep(1)
        return int(state["ExitCode"]), self.compose("logs", "--no-color", "run").stdout

    def process(self, service: str) -> int:
        """Return the number that the first process of the service's container has on this machine."""
        return int(self.inspect(service)["State"]["Pid"])

    def submit(self, overrides: str, output: str) -> Submitted:
        """Start one more run that writes into ``outputs/OUTPUT``; the caller waits for it."""
        command = [*self._compose, "--project-name", self.name, "run", "--rm", "-T", "--no-deps", "run"]
        ours = "fedcross engine=remote engine.address=superlink:8000 engine.authority=/keys/public/ca.crt"
        log = self.folder / f"{output}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *ours.split(), *overrides.split(), f"output=/outputs/{output}"],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return Submitted(process, log, self.folder / "outputs" / output)


@dataclass(frozen=True)
class Submitted:
    """A run on its way: its process, its log, its folder."""

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def wait_for_round(self, number: int, seconds: float = 900) -> None:
        """Wait until round `number` has been written."""
        deadline = time.monotonic() + seconds
        while len(self.lines()) < number:
            assert self.process.poll() in (None, 0), self.log.read_text()
            assert time.monotonic() < deadline, f"no round {number} within {seconds:.0f} s\n{self.log.read_text()}"
            time.sleep(0.1)

    def finish(self, seconds: float = 900) -> str:
        """Wait for the end, which must be a good one, and return the log."""
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
        text = self.log.read_text()
        assert code == 0, text
        return text

    def lines(self) -> list[dict[str, Any]]:
        """Return ``metrics.jsonl`` as far as it goes."""
        ledger = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


class Bundle:
    """A device's bundle, started as its page says, as a context manager that takes it down."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        owner = 10001 if os.getuid() == 0 else os.getuid()  # root's files would need a container of root's
        if owner != os.getuid():
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, owner, owner)
        settings = {"DEVICE_USER": f"{owner}:{owner}", "FEDCROSS_IMAGE": IMAGE, "DEVICE_DATA": str(data)}
        self._environment = {**os.environ, **settings}
        self._command = [*compose_command(), "--project-name", f"device-{secrets.token_hex(4)}"]

    def __enter__(self) -> Self:
        self._run("up", "-d")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run("down", "--volumes", "--timeout", "5")

    def log(self) -> str:
        """Return what the device has said."""
        return self._run("logs", "--no-color")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], cwd=self.folder, env=self._environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


class Stranger:
    """A container on the clients' network that attacks without credentials (:mod:`tests.support.attacker`).

    As a context manager: it runs from the beginning of the block, and is gone after it.
    """

    def __init__(self, federation: Federation, kind: str, seconds: int, count: int, seed: int = 0) -> None:
        authority = federation.folder / "ca.crt"
        authority.write_text(federation.python("superlink", "print(open('/keys/server/ca.crt').read())"))
        for path in (federation.folder, *federation.folder.parents):
            if path.name.startswith("pytest-") or path == federation.folder or path.name.startswith("compose"):
                path.chmod(path.stat().st_mode | 0o011)  # the container's user must get through to the two mounts
        self._name = f"stranger-{secrets.token_hex(4)}"
        own = ["--name", self._name, "--user", "10001:10001", "--network", f"{federation.name}_edge"]
        mounts = ["-v", f"{federation.folder}/tests:/attack/tests:ro", "-v", f"{authority}:/attack/ca.crt:ro"]
        command = ["python", "-m", "tests.support.attacker", kind, "gateway:8443", "/attack/ca.crt"]
        numbers = [str(seconds), str(count), str(seed)]
        self._process = subprocess.Popen(
            ["docker", "run", "--rm", *own, *mounts, "-e", "PYTHONPATH=/attack", IMAGE, *command, *numbers],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        docker("kill", self._name, check=False)
        self._process.communicate()

    def line(self) -> dict[str, int]:
        """Return the next line that it prints; what never happened counts 0."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text.startswith("{"), text + self._process.stdout.read()
        return Counter(json.loads(text))

    def end(self) -> dict[str, int]:
        """Wait until it has ended and return its last line."""
        output, _ = self._process.communicate(timeout=300)
        return Counter(json.loads(output.splitlines()[-1]))


def interface_bytes(process: int) -> int:
    """Return the bytes that a container has received and sent on all its interfaces but loopback.

    From outside and at once: to start something in the container would take as long as a round's messages do.
    """
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]
    rows = [line.replace(":", " ").split() for line in lines]
    return sum(int(row[1]) + int(row[9]) for row in rows if row[0] != "lo")


def docker(*arguments: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one docker command."""
    return subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=check)


def image(name: str) -> dict[str, Any]:
    """Return what the engine knows of an image."""
    found: dict[str, Any] = json.loads(docker("image", "inspect", name).stdout)[0]
    return found


def deal(folder: Path) -> Path:
    """Write three clients' and the server's data, and all of it in one file with its owners; return that file's folder.

    The devices own different digits of scikit-learn's: 0 to 3, 3 to 6, 6 to 9, and different numbers of them.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # As large as MNIST's pictures, for LeNet-5.
    x = np.pad(np.kron(bunch.images * 15, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    y = bunch.target.astype(np.int64)
    test = np.arange(len(y)) % 5 == 0
    owned = {
        "client-1": np.flatnonzero(~test & (y <= 3) & (np.arange(len(y)) % 2 == 0)),
        "client-2": np.flatnonzero(~test & (y >= 3) & (y <= 6) & (np.arange(len(y)) % 2 == 1)),
        "client-3": np.flatnonzero(~test & (y >= 6)),
    }
    files: dict[str, dict[str, Any]] = {name: {"x": x[rows], "y": y[rows]} for name, rows in owned.items()}
    files["server"] = {"x_test": x[test], "y_test": y[test]}
    rows = np.concatenate(list(owned.values()))
    users = np.concatenate([np.full(len(own), name) for name, own in owned.items()])
    files["together"] = {"x": x[rows], "y": y[rows], "users": users, **files["server"]}
    for name, arrays in files.items():
        (folder / name).mkdir(parents=True)
        np.savez(folder / name / "data.npz", **arrays)
        (folder / name).chmod(0o755)
        (folder / name / "data.npz").chmod(0o644)
    return folder / "together"


def places(folder: Path) -> dict[str, str]:
    """Return the variables that name the folders that :func:`deal` wrote."""
    numbers = {f"FEDCROSS_CLIENT_{i}_DATA": str(folder / f"client-{i}") for i in (1, 2, 3)}
    return {**numbers, "FEDCROSS_SERVER_DATA": str(folder / "server")}
