"""A compose federation of this checkout, for tests: own project name, own copy of the tracked files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import fedcross
from fedcross.engines.flower import free_ports

ROOT = Path(fedcross.__file__).resolve().parent.parent
IMAGE = "fedcross-e2e"
CLIENTS = ("client-1", "client-2", "client-3")


def docker(*arguments: str, stdin: str = "", check: bool = True) -> str:
    """Run one command of the engine and return what it says."""
    done = subprocess.run(["docker", *arguments], text=True, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout + ("" if check else done.stderr)


def compose_command() -> list[str]:
    """Return what this machine calls compose: the plugin of v2, or 1.29's own program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


class Federation:
    """``docker compose up`` in a fresh copy of the project, as a context manager that takes everything down."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.name = folder, f"fedcross-{secrets.token_hex(4)}"
        self.port, self.page_port = free_ports(2)
        own = {"FEDCROSS_IMAGE": IMAGE, "FEDCROSS_PORT": str(self.port), "FEDCROSS_PAGE_PORT": str(self.page_port)}
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "0", **own, **settings}
        self.command = [*compose_command(), "--project-name", self.name]

    def __enter__(self) -> Self:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file() and not name.startswith(("results/", "docs/")):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            print(self.compose("logs", "--no-color", "--tail=60", check=False))
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run one compose command with the federation's settings and return what it says."""
        done = subprocess.run(
            [*self.command, *arguments], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(arguments)}\n{done.stdout[-6000:]}"
        return done.stdout

    def admin(self, *arguments: str, check: bool = True) -> str:
        """Run ``fedcross deploy`` at the server and return what it says."""
        return self.compose("run", "--rm", "-T", "--no-deps", "admin", *arguments, check=check)

    def container(self, service: str) -> str:
        """Return the id of the service's container, running or not."""
        labels = {"project": self.name, "service": service, "oneoff": "False"}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()[0]

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of the service's container."""
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)))[0]
        return found

    def python(self, service: str, code: str) -> str:
        """Run Python code in the service's container and return what it prints."""
        return docker("exec", "-i", self.container(service), "python3", "-", stdin=code)

    def attack(self, kind: str, seconds: int = 0) -> Callable[[], dict[str, int]]:
        """Start :mod:`tests.support.stranger` on the clients' network; the result waits for what happened."""
        authority = self.folder / "ca.crt"
        authority.write_text(self.python("superlink", "print(open('/keys/server/ca.crt').read())"))
        code = ROOT / "tests" / "support" / "stranger.py"
        command = ["python3", "/tmp/stranger.py", kind, "gateway:8443", "/tmp/ca.crt", str(seconds)]
        stranger = docker("create", "--rm", "--network", f"{self.name}_edge", IMAGE, *command).strip()
        for file, name in ((code, "stranger.py"), (authority, "ca.crt")):
            docker("cp", str(file), f"{stranger}:/tmp/{name}")
        process = subprocess.Popen(["docker", "start", "--attach", stranger], text=True, stdout=subprocess.PIPE)

        def result() -> dict[str, int]:
            found: dict[str, int] = json.loads(process.communicate(timeout=seconds + 120)[0])
            return found

        return result

    def submit(self, *overrides: str, output: str) -> Submitted:
        """Start one more run that writes into ``outputs/OUTPUT``; the caller waits for it."""
        ours = ["fedcross", "engine=remote", "engine.address=superlink:8000", "engine.authority=/keys/server/ca.crt"]
        log, command = self.folder / f"{output}.log", ["run", "--rm", "-T", "--no-deps", "run", *ours]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*self.command, *command, *overrides, f"output=/outputs/{output}"],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return Submitted(process, log, self.folder / "outputs" / output)


@dataclass(frozen=True)
class Submitted:
    """A run on its way: its process, its log, its folder."""

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def wait_for_round(self, number: int, seconds: float = 600) -> None:
        """Wait until round `number` has been written."""
        deadline = time.monotonic() + seconds
        while len(self.lines()) < number:
            assert self.process.poll() in (None, 0), self.log.read_text()
            assert time.monotonic() < deadline, f"no round {number} within {seconds:.0f} s\n{self.log.read_text()}"
            time.sleep(0.1)

    def finish(self, seconds: float = 900) -> list[dict[str, Any]]:
        """Wait for the end, which must be a good one, and return the lines of the rounds."""
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        assert code == 0, self.log.read_text()
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """Return ``metrics.jsonl`` as far as it goes."""
        ledger = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
