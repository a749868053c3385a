"""Follows, lists and stops runs over the SuperLink's Control API; a SuperLink that is away for a while ends nothing.

A run belongs to the SuperLink and its SuperExec. The process that watches it may lose its connection, for example
because the SuperLink starts again with its database, while the run goes on: so the log is asked for again from where it
broke off, and only the SuperLink's own word decides how the run has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcross.core.errors import FederationError
from fedcross.engines.processes import ANSI

if TYPE_CHECKING:
    from flwr.proto.run_pb2 import Run as FlowerRun
    from flwr.supercore.control import ControlHttpClient

LogSink = Callable[[str], None]

#: How long a watcher waits for a SuperLink that does not answer, in seconds.
PATIENCE_S = 300.0
_POLL_S = 0.1
_AGAIN_S = 1.0
#: The SuperLink looks for new lines every three seconds.
_LOG_S = 8.0
#: Most runs that :func:`listing` asks for.
MOST = 100


@dataclass(frozen=True)
class Listed:
    """A run as the SuperLink knows it.

    Attributes
    ----------
    run_id : int
        Flower's id.
    status : str
        ``pending``, ``starting``, ``running``, or ``finished:`` and ``completed``, ``stopped`` or ``failed``.
    details : str
        Why it failed.
    since : str
        When it was submitted, ISO 8601.
    overrides : str
        The configuration as it travels in Flower's run config; empty for a run of another app.
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


def listing(client: ControlHttpClient) -> list[Listed]:
    """Return the newest runs, the newest first."""
    from flwr.proto.control_pb2 import ListRunsRequest

    found = client.ListRuns(ListRunsRequest(limit=MOST)).run_dict.values()
    return sorted(map(_listed, found), key=lambda run: run.since, reverse=True)


def find(client: ControlHttpClient, run_id: int) -> Listed:
    """Return one run."""
    from flwr.proto.control_pb2 import ListRunsRequest

    return _listed(client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id])


def _listed(run: FlowerRun) -> Listed:
    status = ":".join(part for part in (run.status.status, run.status.sub_status) if part)
    overrides = run.override_config["overrides"].string if "overrides" in run.override_config else ""
    return Listed(run.run_id, status, run.status.details, run.pending_at, overrides)


def stop(client: ControlHttpClient, run_id: int) -> None:
    """Stop a run: the SuperLink refuses its ServerApp from now on, and the ServerApp's process ends.

    Raises
    ------
    FederationError
        If the SuperLink does not do it.
    """
    from flwr.proto.control_pb2 import StopRunRequest

    if not client.StopRun(StopRunRequest(run_id=run_id)).success:
        raise FederationError(f"run {run_id}: the SuperLink did not stop it. See fedcross deploy runs.")


def so_far(client: ControlHttpClient, run_id: int) -> str:
    """Return the log of a run up to now; empty if there is none within a few seconds."""
    import httpx
    from flwr.proto.control_pb2 import StreamLogsRequest

    found: queue.Queue[str] = queue.Queue()

    def first() -> None:
        try:
            found.put(next((piece.log_output for piece in client.StreamLogs(StreamLogsRequest(run_id=run_id))), ""))
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

    Parameters
    ----------
    client : ControlHttpClient
        Used by a thread of this function until it returns.
    run_id : int
        Flower's id of the run.
    sink : callable
        Receives the lines.
    check : callable
        Called ten times a second; what it raises ends the watching.
    patience_s : float
        How long the SuperLink may be away.

    Raises
    ------
    FederationError
        If the SuperLink refuses, or is away for longer. The run may go on then.
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
    from flwr.proto.control_pb2 import StreamLogsRequest

    after, heard, told = 0.0, time.monotonic(), False
    while True:
        try:
            for piece in client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=after)):
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
                put(
                    f"SuperLink: the connection is lost ({error}); trying again for {patience_s:.0f} s. If it is away "
                    "for long, the run can end; its rounds are on disk, and resume goes on.\n"
                )
                told = True
        time.sleep(_AGAIN_S)
