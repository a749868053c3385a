"""The count of requests behind the privacy statement: none is forgotten, whatever a crash undoes."""

import json
from collections import Counter

import pytest

from fedcross.core.errors import StorageError
from fedcross.server.request_log import NAME, RequestLog
from tests.support.federation import session

NOISED = ["privacy.enabled=true", "privacy.randomness=seed", "clients_per_round=6"]


def test_requests_of_rounds_that_a_crash_has_undone_count(tmp_path):
    """Rounds 1 to 3 before a crash, a checkpoint of round 1; then rounds 2 to 4: 6 requests to each client."""
    first = session(tmp_path, *NOISED, "rounds=4")
    for number in (1, 2, 3):
        first._round(number)
        if number == 1:
            first._checkpoint(1)
    resumed = session(tmp_path, *NOISED, "rounds=4", f"resume={tmp_path}")
    resumed.execute()
    assert json.loads((tmp_path / "result.json").read_text())["privacy"]["uploads"] == 6


def test_a_run_without_a_file_counts_each_client_once_more_and_remembers_it(tmp_path):
    before = Counter({0: 3, 4: 1})
    assert RequestLog(tmp_path, before).counts == {0: 4, 4: 2}
    log = RequestLog(tmp_path, before)
    assert log.counts == {0: 4, 4: 2}
    log.add(4)
    assert RequestLog(tmp_path, before).counts == {0: 4, 4: 3}


def test_a_line_that_was_cut_off_is_of_a_request_that_was_not_sent(tmp_path):
    log = RequestLog(tmp_path)
    log.add(12)
    log.add(12)
    file = tmp_path / NAME
    file.write_bytes(file.read_bytes()[:-6])
    again = RequestLog(tmp_path, Counter())
    assert again.counts == {12: 1}
    again.add(12)
    assert RequestLog(tmp_path, Counter()).counts == {12: 2}


def test_a_new_run_starts_at_zero_and_one_without_privacy_writes_nothing(tmp_path):
    (tmp_path / NAME).write_text('{"client": 1, "requests": 9}\n')
    assert RequestLog(tmp_path).counts == {}
    assert session(tmp_path / "plain").request_log is None
    assert not (tmp_path / "plain" / NAME).exists()


def test_a_full_disk_is_said_before_the_request_leaves(tmp_path, monkeypatch):
    log = RequestLog(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="free disk space, then resume"):
        log.add(1)
