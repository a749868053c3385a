"""A ServerApp process without the process: this one takes the run's task, as a SuperExec does, and works on it.

Flower gives a task to another process if nothing is heard of it for 30 s, which on a crowded machine can be less than a
Python with torch takes to start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedcross.core.errors import FederationError


@contextlib.contextmanager
def grid(port: int, root: Path, secret: Path, seconds: float = 600) -> Iterator[HttpGrid]:
    """Acquire the next ServerApp task of the SuperLink on `port` and yield the grid of its run."""
    address, certificate = f"127.0.0.1:{port}", root.read_bytes()
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=certificate,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret.read_bytes(), protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            ),
        ],
    )
    deadline = time.monotonic() + seconds
    with contextlib.closing(client):
        while True:
            given = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if given.HasField("task") and given.token:
                break
            if time.monotonic() > deadline:
                raise FederationError(f"no task after {seconds:.0f} s")
            time.sleep(0.2)
    found = HttpGrid(address, False, certificate, token=given.token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(found._runtime_client))
    heartbeat.start()
    try:
        task = found._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        found.set_run(run_from_proto(task.run))
        yield found
    finally:
        heartbeat.stop()
        found.close()
