"""A reply that takes all memory loses its slot; its node is left out for the rest of the run."""

import pytest

from fedcross.server.reply_log import WriteAheadLog
from fedcross.strategies.fedavg import FedAvg
from tests.support.slots import asked, drawn, federation

LOGS = []


def poisoned(clock, tmp_path, fault, client, **values):
    """Return a run over a network in which pulling the reply of `client` raises `fault`."""
    log = WriteAheadLog(tmp_path, "r", 0)
    LOGS.append(log)
    driver, grid = federation(clock, kind=FedAvg, log=log, networked=True, packed=False, **values)
    pull, sent = grid.pull_messages, {}

    def pull_messages(ids):
        (one,) = ids
        if sent[one] == client:
            raise fault
        arrived.update({reply.metadata.reply_to_message_id: reply for reply in pull(ids)})
        return [arrived.pop(one)] if one in arrived else []

    arrived, push = {}, grid.push_messages

    def push_messages(messages):
        messages = list(messages)
        ids = push(messages)
        sent.update({i: m.content.config_records["config"]["client"] for i, m in zip(ids, messages)})
        return ids

    grid.pull_messages, grid.push_messages = pull_messages, push_messages
    return driver, grid


@pytest.fixture(autouse=True)
def _closed():
    yield
    while LOGS:
        LOGS.pop().close()


def test_the_slot_is_lost_and_the_node_is_named_and_left_out(clock, tmp_path, caplog):
    lost = drawn()[1]
    driver, grid = poisoned(clock, tmp_path, MemoryError(), lost, clients_per_round=3)
    report = driver.run_round(1, grid)
    assert (report.dropped, report.rejected["too_large"]) == (1, 1)
    assert f"node {lost + 1}" in caplog.text
    assert clock.now < 5  # nobody waits for it
    for number in range(2, 8):
        driver.run_round(number, grid)
    assert asked(grid).count(lost) == 1
    assert driver.checkpoint().values["clients"]["excluded"] == [lost + 1]


def test_a_second_death_during_a_pull_leaves_the_node_out(clock, tmp_path, monkeypatch):
    lost = drawn()[0]
    driver, grid = poisoned(clock, tmp_path, SystemExit(9), lost)
    packed = driver.checkpoint()
    for excluded in (set(), {lost + 1}):
        note = LOGS[-1].pulling
        monkeypatch.setattr(LOGS[-1], "pulling", lambda node, note=note: node is None or note(node))  # it was killed
        with pytest.raises(SystemExit):
            driver.run_round(1, grid)
        driver, grid = poisoned(clock, tmp_path, SystemExit(9), lost)
        driver.restore(packed)
        assert driver.nodes.excluded == excluded
    driver.run_round(1, grid)
    assert lost not in asked(grid)


def test_a_checkpoint_forgets_a_single_death(clock, tmp_path):
    WriteAheadLog(tmp_path, "r", 0).pulling(7)
    log = WriteAheadLog(tmp_path, "r", 0)
    LOGS.append(log)
    log.restart(1)
    log.pulling(None)
    assert WriteAheadLog(tmp_path, "r", 1).killers() == []
    log.pulling(7)
    assert WriteAheadLog(tmp_path, "r", 1).killers() == []
