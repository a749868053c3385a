import os

import numpy as np
import pytest

from fedcross.engines.grid import LocalGrid
from fedcross.server.reply_log import WriteAheadLog, records
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same, session

FIRST, SECOND = Round(3, 0, (4, 7), 0), Round(3, 1, (4, 7), 0)


def upload(client, slot=0):
    arrays = {
        "w": np.full((2, 3), client, np.float32),
        "n": np.array(5, np.int64),
        "empty": np.zeros((0, 2), np.float32),
    }
    extras = {"control": {"c": np.array([True, False])}, "none": {}}
    return Upload(client, slot, arrays, extras, 12, {"train-loss": 0.1 + client}, nbytes=34)


def equal(a, b):
    return (
        (a.client, a.slot, a.num_examples, a.metrics, a.nbytes)
        == (b.client, b.slot, b.num_examples, b.metrics, b.nbytes)
        and same(a.arrays, b.arrays)
        and list(a.extras) == list(b.extras)
        and all(same(a.extras[name], b.extras[name]) for name in a.extras)
    )


@pytest.fixture
def written(tmp_path):
    """A log after checkpoint 2: round 3 drawn, its first exchange over, one reply of the second."""
    log = WriteAheadLog(tmp_path, "run", 2)
    log.draw(3, {1: 0.66, 4: 0.1 + 0.2, 7: 1.0})
    log.accept(FIRST, upload(4))
    log.accept(FIRST, upload(7, 1))
    log.end(FIRST)
    log.accept(SECOND, upload(4, 1))
    log.close()
    return tmp_path


def test_what_was_accepted_comes_back(written):
    log = WriteAheadLog(written, "run", 2)
    assert log.drawn(3) == {1: 0.66, 4: 0.1 + 0.2, 7: 1.0}
    assert log.drawn(4) is None
    one, two = log.accepted(FIRST)
    assert equal(one, upload(4))
    assert equal(two, upload(7, 1))
    assert log.is_over(FIRST)
    assert [equal(found, upload(4, 1)) for found in log.accepted(SECOND)] == [True]
    assert not log.is_over(SECOND)
    assert log.accepted(SECOND) == []


def test_a_log_that_was_found_goes_on_behind_the_next_checkpoint(written):
    log, later = WriteAheadLog(written, "run", 2), Round(4, 0, (4, 7), 0)
    log.restart(3)
    log.accept(later, upload(7))
    log.close()
    assert [equal(found, upload(7)) for found in WriteAheadLog(written, "run", 3).accepted(later)] == [True]


def test_a_node_is_left_out_after_two_deaths_between_two_checkpoints(tmp_path):
    for after in (2, 2):  # a process that dies as it pulls node 5's reply, and the next one
        WriteAheadLog(tmp_path, "run", after).pulling(5)
    log = WriteAheadLog(tmp_path, "run", 2)
    assert log.killers() == [5]
    log.restart(3)
    log.close()
    assert log.killers() == []


@pytest.mark.parametrize(("run", "after"), [("another", 2), ("run", 1), ("run", 3)])
def test_the_log_of_another_run_or_checkpoint_is_not_used(written, run, after):
    log = WriteAheadLog(written, run, after)
    assert log.drawn(3) is None
    assert log.accepted(FIRST) == []


def test_every_truncation_leaves_the_whole_records_before_it(written):
    path = written / "checkpoints" / "accepted.log"
    whole = path.read_bytes()
    ends = [0, *(stop for _, _, stop in records(path))]
    assert len(ends) == 7
    for size in {*range(0, len(whole), 37), *ends, *(end + 1 for end in ends[:-1]), len(whole) - 1}:
        path.write_bytes(whole[:size])
        assert len(list(records(path))) == sum(end <= size for end in ends) - 1, size
    path.write_bytes(whole[: ends[4] - 1])  # in the middle of the second reply
    log = WriteAheadLog(written, "run", 2)
    assert [found.client for found in log.accepted(FIRST)] == [4]
    log.accept(FIRST, upload(7, 1))
    log.close()
    assert path.stat().st_size == ends[4]  # the torn record is gone, the new one follows a whole one
    assert [found.client for found in WriteAheadLog(written, "run", 2).accepted(FIRST)] == [4, 7]


def test_a_damaged_byte_ends_the_log_there(written):
    path = written / "checkpoints" / "accepted.log"
    whole = path.read_bytes()
    ends = [0, *(stop for _, _, stop in records(path))]
    generator = np.random.default_rng(1)
    for place in generator.integers(len(whole), size=200):
        data = bytearray(whole)
        data[place] ^= 1 << generator.integers(8)
        path.write_bytes(bytes(data))
        assert len(list(records(path))) == sum(end <= place for end in ends) - 1


def test_a_reply_is_on_disk_when_it_counts(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda number: synced.append(os.fstat(number).st_size))
    log = WriteAheadLog(tmp_path, "run", 0)
    log.accept(FIRST, upload(4))
    log.close()
    assert synced == [log.path.stat().st_size]


class Stopping(LocalGrid):
    """A grid on which the server dies before its n-th train message is carried out."""

    left = 10**6

    def _carry_out(self, message):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super()._carry_out(message)


def stopped(folder, after, *overrides):
    """Run until `after` visits are done, then resume; return the resumed session and its visits."""
    overrides = ("checkpoint.log=true", *overrides)
    first = session(folder, *overrides)
    first.grid.__class__ = Stopping
    first.grid.left = after
    with pytest.raises(KeyboardInterrupt):
        first.execute()
    second = session(folder, *overrides, f"resume={folder}")
    second.grid.__class__ = Stopping
    second.execute()
    return second, 10**6 - second.grid.left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "visits"), [("fedcross", 9), ("scaffold", 9), ("clusamp", 9), ("fedct", 18), ("moon", 9)]
)
def test_a_resumed_run_is_exact_and_repeats_no_accepted_visit(tmp_path, method, visits):
    """Stopped in its second round after two accepted replies; FedCT's rounds have two exchanges each."""
    named = f"method={method}"
    whole = run(tmp_path / "whole", named)
    per_round = visits // 3
    resumed, done = stopped(tmp_path / "stopped", per_round + 2, named)
    assert done == visits - per_round - 2
    assert same(resumed.driver.global_model(), whole.driver.global_model())
    assert resumed.driver.ledger.clients.accepted == whole.driver.ledger.clients.accepted
