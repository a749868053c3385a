"""Starts, follows, lists and stops runs over the SuperLink's Control API.

A run whose ServerApp, SuperLink or SuperExec died is started again and continues in its folder (:func:`complete`).
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import FederationError
from fedcross.core.settings import join, quote, split, unquote
from fedcross.engines import memory
from fedcross.engines.flower_private import control_pb2
from fedcross.engines.processes import ANSI

if TYPE_CHECKING:
    from fedcross.engines.flower_private import ControlHttpClient

LogSink = Callable[[str], None]

#: How long a watcher waits for a SuperLink that does not answer, in seconds.
PATIENCE_S = 300.0
_POLL_S, _AGAIN_S = 0.1, 1.0
#: The SuperLink looks for new lines every three seconds.
_LOG_S = 8.0
#: Most runs that :func:`listing` asks for.
MOST = 100
#: How often a run is started again without a finished round in between.
MOST_DEATHS = 3
COMPLETED = "finished:completed"


@dataclass(frozen=True)
class Listed:
    """A run as the SuperLink knows it.

    `status` is ``pending``, ``starting``, ``running``, or ``finished:`` and ``completed``, ``stopped`` or ``failed``;
    `details` say why it failed, `since` when it was submitted (ISO 8601). `overrides` are empty for another app.
    """

    run_id: int
    status: str
    details: str
    since: str
    overrides: str

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")


def start(
    client: ControlHttpClient, fab: Path, overrides: str, simulation: Mapping[str, float] = MappingProxyType({})
) -> int:
    """Submit the app bundle `fab` with this configuration and return Flower's id of the run.

    `simulation` are fields of Flower's ``SimulationConfig``, for a SuperLink in simulation mode.
    """
    request = control_pb2.StartRunRequest()
    request.fab.content, request.fab.hash_str = (content := fab.read_bytes()), hashlib.sha256(content).hexdigest()
    request.override_config["overrides"].string = overrides
    for name, value in simulation.items():
        setattr(request.override_federation_config, name, value)
    answer = client.StartRun(request)
    if not answer.HasField("run_id"):
        raise FederationError("The SuperLink did not start the run; its log says why.")
    return int(answer.run_id)


def complete(
    client: ControlHttpClient,
    fab: Path,
    overrides: str,
    sink: LogSink,
    check: Callable[[], None] = lambda: None,
    started: Callable[[int], None] = lambda _: None,
) -> None:
    """Start a run and follow it until it has completed; continue it after the death of a server process.

    `started` receives the id of each Flower run. Raises FederationError if the ServerApp raises an error, somebody
    stops the run, or it dies more than :data:`MOST_DEATHS` times without a checkpoint in between.
    """
    deaths, reached = 0, _checkpoints(overrides)
    while True:
        killed = memory.kills()
        started(run_id := start(client, fab, overrides))
        ended = follow(client, run_id, sink, check)
        if ended.status == COMPLETED:
            return
        details = f" ({ended.details})" if ended.details else ""
        died = memory.end_of(ended.details, killed) if ended.status == "finished:failed" else ""
        deaths, reached = (deaths + 1 if _checkpoints(overrides) == reached else 1), _checkpoints(overrides)
        if not died or folder_of(overrides) is None or deaths > MOST_DEATHS:
            raise FederationError(f"The Flower run {run_id} is {ended.status}{details}. {died}".rstrip())
        sink(f"fedcross: {died} The run is started again.")
        overrides = continued(overrides)


def folder_of(overrides: str) -> Path | None:
    """Return the folder that a run writes, None for a run of another app."""
    named = [one for one in split(overrides) if one.startswith(("output=", "resume="))]
    return Path(unquote(named[-1].split("=", 1)[1])) if named else None


def continued(overrides: str) -> str:
    """Return the configuration that continues a run in its folder; the same one before the first checkpoint."""
    if not _checkpoints(overrides):
        return overrides
    kept = [one for one in split(overrides) if not one.startswith("resume=")]
    return join([*kept, f"resume={quote(str(folder_of(overrides)))}"])


def _checkpoints(overrides: str) -> list[str]:
    folder = folder_of(overrides)
    return [] if folder is None else sorted(path.name for path in (folder / "checkpoints").glob("round-*.safetensors"))


def listing(client: ControlHttpClient) -> list[Listed]:
    """Return the newest runs, the newest first."""
    found = client.ListRuns(control_pb2.ListRunsRequest(limit=MOST)).run_dict.values()
    return sorted(map(_listed, found), key=lambda run: run.since, reverse=True)


def find(client: ControlHttpClient, run_id: int) -> Listed:
    """Return one run."""
    return _listed(client.ListRuns(control_pb2.ListRunsRequest(run_id=run_id)).run_dict[run_id])


def _listed(run: Any) -> Listed:
    status = ":".join(part for part in (run.status.status, run.status.sub_status) if part)
    overrides = run.override_config["overrides"].string if "overrides" in run.override_config else ""
    return Listed(run.run_id, status, run.status.details, run.pending_at, overrides)


def stop(client: ControlHttpClient, run_id: int) -> None:
    """Stop a run; its ServerApp's process ends. Raise FederationError if the SuperLink does not do it."""
    if not client.StopRun(control_pb2.StopRunRequest(run_id=run_id)).success:
        raise FederationError(f"run {run_id}: the SuperLink did not stop it. See fedcross deploy status.")


def so_far(client: ControlHttpClient, run_id: int) -> str:
    """Return the log of a run up to now; empty if there is none within a few seconds."""
    import httpx

    found: queue.Queue[str] = queue.Queue()

    def first() -> None:
        request = control_pb2.StreamLogsRequest(run_id=run_id)
        try:
            found.put(next((piece.log_output for piece in client.StreamLogs(request)), ""))
        except (httpx.HTTPError, ValueError, RuntimeError):
            found.put("")

    threading.Thread(target=first, daemon=True).start()
    try:
        return ANSI.sub("", found.get(timeout=_LOG_S))
    except queue.Empty:
        return ""


def follow(
    client: ControlHttpClient,
    run_id: int,
    sink: LogSink,
    check: Callable[[], None] = lambda: None,
    patience_s: float = PATIENCE_S,
) -> Listed:
    """Pass on the log of a run, line by line, until it has ended; return how it ended.

    `check` is called ten times a second; what it raises ends the watching. Raises FederationError if the SuperLink
    refuses, or is away for `patience_s` seconds. The run may go on then.
    """
    found: queue.Queue[str | Listed | Exception] = queue.Queue()
    threading.Thread(target=_read, args=(client, run_id, found.put, patience_s), daemon=True).start()
    rest = ""
    while True:
        check()
        try:
            item = found.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if isinstance(item, str):
            *lines, rest = (rest + ANSI.sub("", item)).replace("\r\n", "\n").split("\n")
            for line in lines:
                sink(line)
            continue
        if rest:
            sink(rest)
        if isinstance(item, Exception):
            raise item
        return item


def _read(
    client: ControlHttpClient, run_id: int, put: Callable[[str | Listed | Exception], None], patience_s: float
) -> None:
    """Hand over the pieces of the log as they come, then how the run ended, or what made that impossible."""
    import httpx

    after, heard, told = 0.0, time.monotonic(), False
    while True:
        try:
            for piece in client.StreamLogs(control_pb2.StreamLogsRequest(run_id=run_id, after_timestamp=after)):
                after, heard, told = max(after, piece.latest_timestamp), time.monotonic(), False
                put(piece.log_output)
            ended = find(client, run_id)
            heard, told = time.monotonic(), False
            if ended.over:
                return put(ended)
        except (httpx.HTTPError, ValueError, RuntimeError, KeyError) as error:
            # A ValueError is a stream that broke off, a RuntimeError a client that was closed.
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or isinstance(error, RuntimeError) or time.monotonic() - heard > patience_s:
                text = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else str(error)
                said = f"run {run_id}: the SuperLink cannot be asked any more ({text})."
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
                    said += f" To follow the run with a new call: fedcross deploy logs {run_id} --follow"
                return put(FederationError(said))
            if not told:
                put(f"SuperLink: the connection is lost ({error}); trying again for {patience_s:.0f} s.\n")
                told = True
        time.sleep(_AGAIN_S)
