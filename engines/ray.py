"""Flower's simulation runtime on Ray: many clients on one machine or cluster.

``flwr run`` alone would start a SuperLink that keeps running afterwards, with the environment of its first start.
Here, the engine starts its own SuperLink in simulation mode, with a free port and a separate Flower home, and ends it
with the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from fedcross.core.events import relay
from fedcross.core.settings import Settings
from fedcross.engines import bundle, flower, runs
from fedcross.engines.job import Capabilities
from fedcross.engines.processes import Family, terminated_by_signal

if TYPE_CHECKING:
    from fedcross.engines.job import Job

CAPABILITIES = Capabilities(simulates=True)
#: Prefixes of the environment variables that clients read.
OURS = ("FEDCROSS_", "OMP_NUM_THREADS")
#: Environment variable: how long Ray waits for its node to start. Its default is too short for a loaded machine.
START = "RAY_raylet_start_wait_time_s"
START_SECONDS = 300
#: Most clients that share a GPU unless the user says so, and the smallest part of a GPU that Ray knows, inverted.
MOST = 8
SMALLEST = 10_000


class Params(Settings):
    """Resources that Ray gives to the clients.

    Parameters
    ----------
    client_cpus : int
        CPU cores per client; Ray runs as many clients at once as fit.
    client_gpus : float or None
        Share of a GPU per client; None: as many clients share a GPU as train at once, at most :data:`MOST`. Ray hides
        all GPUs from clients with a share of 0.
    cpus, gpus : int or None
        Cores and GPUs that Ray may use in total; None: all that it finds.
    address : str or None
        An existing Ray cluster (``host:port``) to join; None: start one on this machine. The cluster has
        its own resources, so `cpus` and `gpus` cannot be given with it.
    """

    name: str = "ray"
    client_cpus: int = Field(1, ge=1)
    client_gpus: float | None = Field(None, ge=0)
    cpus: int | None = Field(None, ge=1)
    gpus: int | None = Field(None, ge=0)
    address: str | None = None

    @model_validator(mode="after")
    def _one_client_fits(self) -> Self:
        if self.address is not None and (self.cpus is not None or self.gpus is not None):
            raise ValueError("an existing cluster has its own cpus and gpus: leave both unset, or leave address unset")
        # Ray would wait forever for resources that do not exist.
        if self.cpus is not None and self.cpus < self.client_cpus:
            raise ValueError(f"cpus={self.cpus} is less than client_cpus={self.client_cpus}, so no client could run")
        if self.gpus is not None and self.client_gpus is not None and self.gpus < self.client_gpus:
            raise ValueError(f"gpus={self.gpus} is less than client_gpus={self.client_gpus}, so no client could run")
        return self

    def faults(self, device: str) -> list[str]:
        """Return why clients could not train on `device` under these settings."""
        if not device.startswith("cuda"):
            return []
        if ":" in device:
            return [f"device={device}: Ray decides which GPU a client gets, and numbers it 0 there. Use device=cuda."]
        if self.client_gpus == 0:
            return ["engine.client_gpus=0: Ray hides the GPUs from such clients. Leave it unset, or use device=cpu."]
        if self.address is not None and self.client_gpus is None:
            return ["engine.client_gpus: this machine does not know the cluster's GPUs. Set the share of one client."]
        return []

    def remarks(self, device: str) -> list[str]:
        """Return what is allowed and probably not meant."""
        if device == "auto" and self.address is not None and self.client_gpus is None:
            return ["engine.client_gpus is not set: the cluster's clients train on CPUs."]
        return []

    def gpu_share(self, found: int, cores: int) -> float:
        """Return the share of a GPU per client on a machine with `found` GPUs that clients may use, and `cores` cores.

        At least ``1 / MOST``: every process on a GPU has a context of half a GB there.
        """
        if self.client_gpus is not None:
            return self.client_gpus
        gpus = found if self.gpus is None else min(found, self.gpus)
        if gpus == 0 or self.address is not None:
            return 0.0
        at_once = max(1, (self.cpus or cores) // self.client_cpus)
        return math.floor(min(1.0, max(gpus / at_once, 1 / MOST)) * SMALLEST) / SMALLEST


def run(job: Job) -> None:
    """Run `job` on Ray."""
    share = job.settings.gpu_share(job.gpus, os.cpu_count() or 1)
    params = job.settings.model_copy(update={"client_gpus": share})
    launch(job.app_folder, job.overrides, job.clients, job.output / "engine", params)


def launch(
    root: Path | None,
    overrides: str,
    clients: int,
    work: Path,
    params: Params | None = None,
    *,
    app: Path | None = None,
    sink: flower.LogSink = relay,
) -> None:
    """Run a Flower app with `clients` simulated clients on Ray until it ends, and end all processes.

    `root` holds the packages of fedcross (None: where this process imported them), `work` gets the logs, `sink` each
    line of the ServerApp's log; `app` is another Flower app. Raises FederationError if the run does not complete.
    """
    params = params or Params()
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_by_signal())
        state = stack.enter_context(flower.scratch(work))
        # Ray puts sockets into this folder, and the path of a socket has at most 107 bytes.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedcross-", ignore_cleanup_errors=True))
        [port] = flower.free_ports(1)
        environment = flower.environment(state / "flwr", ray_environment(params, short))
        fab = bundle.build(app or bundle.make(state / "app", root), state, environment)
        family = stack.enter_context(Family(work, environment, [state, Path(short)]))
        family.start("superlink", superlink_command(port))
        flower.wait_for_superlink(family, port)
        client = stack.enter_context(contextlib.closing(flower.control_client(port)))
        log = stack.enter_context(flower.run_log(family.log("run"), sink))
        run_id = runs.start(client, fab, overrides, simulation(clients, params))
        ended = runs.follow(client, run_id, log, lambda: _server_lives(family))
        if ended.status != runs.COMPLETED:
            details = f" ({ended.details})" if ended.details else ""
            raise family.failure("run", f"The Flower run {run_id} is {ended.status}{details}.")


def _server_lives(family: Family) -> None:
    if "superlink" in family.ended():
        raise family.failure("superlink", "SuperLink ended in the middle of the run.")


def superlink_command(port: int) -> list[str]:
    """Return the command that starts the SuperLink in simulation mode; it listens on loopback only."""
    return [
        flower.executable("flower-superlink"),
        *("--simulation", "--insecure", "--isolation", "subprocess"),
        *("--host", flower.LOOPBACK, "--port", str(port), "--disable-runtime-dependency-installation"),
    ]


def simulation(clients: int, params: Params) -> dict[str, float]:
    """Return Flower's ``SimulationConfig`` by name, without what Ray chooses itself."""
    values = {
        "num_supernodes": clients,
        "client_resources_num_cpus": params.client_cpus,
        "client_resources_num_gpus": float(params.client_gpus or 0),
        "init_args_num_cpus": params.cpus,
        "init_args_num_gpus": params.gpus,
    }
    return {name: value for name, value in values.items() if value is not None}


def ray_environment(params: Params, scratch: str) -> dict[str, str]:
    """Return Ray's environment variables: no usage report, a longer time limit for the start, the cluster's address.

    A cluster that this engine starts keeps its session files in `scratch`. To an existing one, the variables that
    clients read are sent with the job.
    """
    result = {"RAY_USAGE_STATS_ENABLED": "0", START: os.environ.get(START, str(START_SECONDS))}
    if params.address is None:
        return {**result, "RAY_TMPDIR": scratch}
    ours = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
    job = {"runtime_env": {"env_vars": {**ours, **flower.absolute_folders(ours)}}}
    return {**result, "RAY_ADDRESS": params.address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
