"""A run's log as it is shown while the run is on, and what is done when its process dies."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fedcross.core.errors import FederationError
from fedcross.core.settings import join, split
from fedcross.engines import runs


def test_lines_that_come_in_pieces_are_shown_whole(monkeypatch):
    ended = runs.Listed(1, "finished:completed", "", "", "")
    pieces = ["\x1b[92mround", " 1\r\nround 2\nlast"]
    streamed = [SimpleNamespace(log_output=piece, latest_timestamp=1.0) for piece in pieces]
    monkeypatch.setattr(runs, "find", lambda client, run_id: ended)
    shown = []
    assert runs.follow(SimpleNamespace(StreamLogs=lambda request: streamed), 1, shown.append) is ended
    assert shown == ["round 1", "round 2", "last"]


@pytest.mark.parametrize("advances", [True, False])
def test_only_deaths_without_a_checkpoint_in_between_end_a_run(tmp_path, monkeypatch, advances):
    starts = []

    def follow(*_):
        if advances and len(starts) > 2 * runs.MOST_DEATHS:
            return SimpleNamespace(status=runs.COMPLETED, details="")
        if advances:
            (tmp_path / "checkpoints" / f"round-{len(starts)}.safetensors").touch()
        return SimpleNamespace(status="finished:failed", details="killed")

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(runs, "start", lambda *_: starts.append(0) or len(starts))
    monkeypatch.setattr(runs, "follow", follow)
    monkeypatch.setattr(runs.memory, "end_of", lambda *_: "Its process was killed.")
    with nullcontext() if advances else pytest.raises(FederationError, match="killed"):
        runs.complete(None, tmp_path, f"output={tmp_path}", [].append)
    assert len(starts) == 1 + runs.MOST_DEATHS * (2 if advances else 1)


def test_a_run_that_died_goes_on_in_its_folder_once_it_has_a_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    before = join([f"output={tmp_path}", "rounds=3"])
    assert runs.continued(before) == before
    (tmp_path / "checkpoints" / "round-000001.safetensors").touch()
    after = runs.continued(before)
    assert split(after) == [f"output={tmp_path}", "rounds=3", f"resume='{tmp_path}'"]
    assert runs.continued(after) == after
