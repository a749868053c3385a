"""Has Flower's SuperExec give its runs to a process that is ready (:mod:`ready`); :mod:`engines.guarded` calls it.

The SuperExec's loop, its secret, its health server and its way to start a process stay Flower's. Three methods get
something in front of them: the question for the next task, the start of a task's process, and the look after processes
between two questions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import closing
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from flwr.supercore.constant import TaskType

from . import operators
from .crew import IDLE_S
from .partner import Partner
from .ready import Ready

#: Variable: seconds without work after which a process ends; a device's worker has the same.
IDLE = "FEDCROSS_EXECUTOR_IDLE"
#: The apps whose runs get the process: Flower's name for publisher and name of our bundles.
OWN = "fedcross/fedcross"


def keeper(way: str, room: Callable[[], bool]) -> Ready:
    """Return what keeps a process ready.

    Parameters
    ----------
    way : str
        ``on`` or ``once``.
    room : callable
        Tells whether one more run may start.
    """
    idle = float(os.environ.get(IDLE, IDLE_S))
    # In one session with the SuperExec, as Flower's processes: Ctrl-C in a terminal reaches all of them.
    return Ready(lambda: Partner("serverapp", own_session=False), room, idle, way == "once")


def attach(ready: Ready) -> None:
    """Put `ready` into the SuperExec that this process is going to be."""
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor as Flower
    from flwr.supercore.superexec.executor.types import LaunchResult

    runs: dict[int, int] = {}
    acquire, launch, close = RuntimeHttpClient.AcquireTask, Flower.launch, Flower.close

    @functools.wraps(acquire)
    def noted(client: Any, request: Any) -> Any:
        found = acquire(client, request)
        runs.clear()
        if found.HasField("task"):
            runs[found.task.task_id] = found.task.run_id
        return found

    @functools.wraps(launch)
    def given(executor: Any, spec: Any) -> Any:
        wanted = task_of(spec)
        if wanted is None or app_of(spec, runs.get(spec.task_id)) != OWN:
            ready.leave()
        elif ready.take(wanted):
            log(INFO, "fedcross: a process that was ready takes task %d", spec.task_id)
            return LaunchResult.accepted()
        return launch(executor, spec)

    @functools.wraps(close)
    def closed(executor: Any) -> None:
        ready.dismiss()
        close(executor)

    def reconcile(executor: Any) -> None:  # noqa: ARG001 - Flower's method; it calls it before each question
        ready.look()

    RuntimeHttpClient.AcquireTask = noted  # type: ignore[method-assign,assignment]
    Flower.launch, Flower.close = given, closed  # type: ignore[method-assign,assignment]
    Flower.reconcile = reconcile  # type: ignore[method-assign,assignment]


def task_of(spec: Any) -> dict[str, Any] | None:
    """Return what a process needs to work on the task of an ``ExecutionSpec``; None if it is none for ours."""
    if spec.task_type != TaskType.SERVER_APP or spec.runtime_dependency_install:
        return None
    arguments = ["--runtime-api-address", spec.runtime_api_address]
    if spec.insecure:
        arguments.append("--insecure")
    elif spec.root_certificates_path is not None:
        arguments += ["--root-certificates", str(spec.root_certificates_path)]
    if spec.parent_pid is not None:
        arguments += ["--parent-pid", str(spec.parent_pid)]
    return {"token": spec.token, "arguments": arguments, "silent": bool(spec.suppress_output)}


def app_of(spec: Any, run: int | None) -> str:
    """Return the name of a run's app, which the SuperLink knows; empty if it does not tell.

    Another app may bring modules with the names of those that a ready process has imported.
    """
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    if run is None:
        return ""
    try:
        authority = None if spec.root_certificates_path is None else Path(spec.root_certificates_path).read_bytes()
        with closing(
            ControlHttpClient.from_server_address(
                server_address=spec.runtime_api_address,
                insecure=spec.insecure,
                root_certificates=authority,
                interceptors=[RuntimeVersionHttpInterceptor(component_name="fedcross"), *operators.bringing()],
            )
        ) as client:
            return str(client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].fab_id)
    except (httpx.HTTPError, OSError, ValueError, KeyError):
        return ""
