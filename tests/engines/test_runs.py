"""Watching a run over a connection that breaks, against a Control API of our own."""

from __future__ import annotations

import httpx
import pytest
from flwr.proto.control_pb2 import ListRunsResponse, StopRunResponse, StreamLogsResponse
from flwr.proto.run_pb2 import Run, RunStatus

from fedcross.core.errors import FederationError
from fedcross.core.overrides import join
from fedcross.engines import runs
from fedcross.engines.executor import operators

LOST = httpx.ConnectError("refused")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runs, "_AGAIN_S", 0.001)


class Control:
    """Answers with `streams` one after another: pieces of log, or an error instead; then the run has `status`."""

    def __init__(self, *streams, status=("finished", "completed"), stopped=True):
        self.streams, self.status, self.stopped = list(streams), status, stopped
        self.asked = []

    def StreamLogs(self, request):
        self.asked.append(request.after_timestamp)
        for piece in self.streams.pop(0) if self.streams else []:
            if isinstance(piece, Exception):
                raise piece
            yield StreamLogsResponse(log_output=piece, latest_timestamp=len(self.asked))

    def ListRuns(self, request):
        going = self.streams and request.HasField("run_id")
        status = RunStatus(status="running") if going else RunStatus(status=self.status[0], sub_status=self.status[1])
        run = Run(run_id=7, status=status, pending_at="2026-11-22T02:00:00")
        run.override_config["overrides"].string = join(["seed=1", "output='/o'"])
        return ListRunsResponse(run_dict={7: run})

    def StopRun(self, request):
        return StopRunResponse(success=self.stopped)


def test_the_log_goes_on_where_it_broke_off():
    client, lines = Control(["one\ntw", LOST], [LOST], ["o\nthr", "ee"]), []
    ended = runs.follow(client, 7, lines.append)
    assert (ended.status, ended.over) == ("finished:completed", True)
    assert [line for line in lines if "connection is lost" not in line and "trying again" not in line][-1] == "three"
    assert "one" in lines
    assert client.asked == [0.0, 1.0, 1.0]
    assert sum("trying again" in line for line in lines) == 1


def test_a_log_that_ends_is_not_the_end_of_the_run():
    client, lines = Control(["one\n"], ["two\n"]), []
    assert runs.follow(client, 7, lines.append).over
    assert lines == ["one", "two"]


@pytest.mark.parametrize("sub_status", ["failed", "stopped"])
def test_how_the_run_ended_is_the_superlinks_word(sub_status):
    assert runs.follow(Control(["x\n"], status=("finished", sub_status)), 7, print).status == f"finished:{sub_status}"


def test_a_superlink_that_stays_away_ends_the_watching():
    with pytest.raises(FederationError, match="cannot be asked any more"):
        runs.follow(Control(*[[LOST]] * 10_000), 7, print, patience_s=0.05)


def test_a_refusal_is_not_asked_again():
    answer = httpx.Response(404, text="no such run", request=httpx.Request("POST", "https://s"))
    refusal = httpx.HTTPStatusError("404", request=answer.request, response=answer)
    client = Control([refusal], ["x"])
    with pytest.raises(FederationError, match="no such run"):
        runs.follow(client, 7, print)
    assert len(client.asked) == 1


def test_who_watches_with_an_old_token_is_told_how_to_go_on():
    answer = httpx.Response(401, text=operators.ANOTHER, request=httpx.Request("POST", "https://s"))
    refusal = httpx.HTTPStatusError("401", request=answer.request, response=answer)
    with pytest.raises(
        FederationError, match=r"start this program again, .*: fedcross deploy logs 7 --follow$"
    ) as told:
        runs.follow(Control([refusal]), 7, print)
    assert operators.ANOTHER in str(told.value)


def test_the_check_ends_the_watching():
    def gone():
        raise FederationError("SuperLink ended")

    with pytest.raises(FederationError, match="SuperLink ended"):
        runs.follow(Control([]), 7, print, gone)


def test_runs_are_listed_and_stopped():
    (run,) = runs.listing(Control())
    assert (run.run_id, run.status, run.overrides) == (7, "finished:completed", join(["seed=1", "output='/o'"]))
    assert runs.so_far(Control(["a\n", "b\n"]), 7) == "a\n"
    assert runs.so_far(Control([LOST]), 7) == ""
    runs.stop(Control(), 7)
    with pytest.raises(FederationError, match="did not stop"):
        runs.stop(Control(stopped=False), 7)
