"""A run's log as it is shown while the run is on."""

from types import SimpleNamespace

from fedcross.engines import runs


def test_lines_that_come_in_pieces_are_shown_whole(monkeypatch):
    ended = runs.Listed(1, "finished:completed", "", "", "")
    pieces = ["\x1b[92mround", " 1\r\nround 2\nlast"]
    streamed = [SimpleNamespace(log_output=piece, latest_timestamp=1.0) for piece in pieces]
    monkeypatch.setattr(runs, "find", lambda client, run_id: ended)
    shown = []
    assert runs.follow(SimpleNamespace(StreamLogs=lambda request: streamed), 1, shown.append) is ended
    assert shown == ["round 1", "round 2", "last"]
