"""Connected nodes: how many a round waits for, who is left out, who holds a partition."""

from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedcross.core.errors import FederationError
from fedcross.engines.grid import identify
from fedcross.engines.network_grid import NetworkGrid
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.settings import RoundSettings


class Grid:
    """Nodes of a network: ``answers`` says which partition each node tells, None for one without an answer."""

    def __init__(self, clock, answers, since=None, names=None):
        identify()
        self.clock, self.answers, self.since, self.sent = clock, answers, since or {}, {}
        self.names = names or {}
        self.joins = {}  # node -> when it is connected

    def get_node_ids(self):
        return [node for node in self.answers if self.joins.get(node, 0) <= self.clock.now]

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, name=self.names.get(node, ""), registered_at=self.since.get(node, ""))
            for node in self.get_node_ids()
        ]

    def push_messages(self, messages):
        found = []
        for message in messages:
            found.append(f"q{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = found[-1]
            self.sent[found[-1]] = message
        return found

    def pull_messages(self, ids):
        replies = []
        for one in sorted(set(ids) & self.sent.keys()):
            told = self.answers.get(self.sent[one].metadata.dst_node_id)
            if told == "foreign":
                replies.append(Message(Error(2, "no query"), reply_to=self.sent.pop(one)))
            elif told is not None:
                config = {"config": ConfigRecord({"partition-id": told})}
                replies.append(Message(RecordDict(config), reply_to=self.sent.pop(one)))
        return replies


@pytest.mark.parametrize(("k", "needed"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (10, 5), (11, 6)])
def test_a_network_needs_half_of_the_clients_and_at_least_two(k, needed):
    assert RoundSettings(clients_per_round=k, nonce=True, networked=True).needed == needed
    assert RoundSettings(clients_per_round=k, nonce=True).needed == k
    assert RoundSettings(clients_per_round=k, nonce=True, networked=True, min_clients=1).needed == 1


def test_a_round_waits_without_an_end_for_too_few(clock):
    grid = Grid(clock, {11: 0, 12: 1})
    grid.joins[12] = 5000.0
    assert Ledger(RoundSettings()).nodes.wait_for(grid, 2, 120, endless=True) == [0, 1]
    assert 5000 <= clock.now < 5100


def test_a_round_with_an_end_says_how_many_are_missing(clock):
    with pytest.raises(FederationError, match="1 clients are connected"):
        Ledger(RoundSettings()).nodes.wait_for(Grid(clock, {11: 0}), 2, 120)
    assert 120 <= clock.now < 160


def test_a_round_begins_with_those_that_are_there(clock):
    assert Ledger(RoundSettings()).nodes.wait_for(Grid(clock, {11: 3, 12: 1}), 2, 120) == [1, 3]
    assert clock.now < 1


def test_a_node_without_an_answer_is_left_out_by_name(clock, caplog):
    nodes = Ledger(RoundSettings()).nodes
    assert nodes.wait_for(Grid(clock, {11: 0, 12: 1, 13: None}), 2, 120) == [0, 1]
    assert nodes.online == {0: 11, 1: 12}
    assert "13" in caplog.text


def test_nodes_of_another_app_are_numbered(clock):
    nodes = Ledger(RoundSettings()).nodes
    assert nodes.wait_for(Grid(clock, {30: "foreign", 20: "foreign"}), 2, 120) == [0, 1]
    assert nodes.online == {0: 20, 1: 30}


def test_nodes_of_another_app_stay_out_where_others_tell_their_partition(clock):
    nodes, grid = Ledger(RoundSettings()).nodes, Grid(clock, {11: 0, 20: "foreign"})
    assert nodes.wait_for(grid, 1, 120) == [0]
    assert nodes.refresh(grid) == [0]  # also when only they are asked


def test_the_key_that_was_registered_first_holds_a_partition(clock):
    ledger = Ledger(RoundSettings())
    nodes = ledger.nodes
    grid = Grid(clock, {11: 0, 12: 0, 13: 1}, {11: "2026-02-02", 12: "2026-01-01"})
    assert nodes.wait_for(grid, 2, 120) == [0, 1]
    assert nodes.online == {0: 12, 1: 13}
    assert ledger.report.rejected["partition_taken"] == 1


def test_where_keys_are_bound_to_partitions_no_node_holds_another_one(clock):
    """Node 12's key is bound to partition 5, node 13's to none."""
    ledger = Ledger(RoundSettings())
    grid = Grid(clock, {11: 0, 12: 1, 13: 2}, names={11: "partition-0", 12: "partition-5"})
    assert ledger.nodes.wait_for(grid, 1, 120) == [0]
    assert ledger.report.rejected["partition_taken"] == 2


def test_an_excluded_node_is_not_asked_again(clock):
    nodes, grid = Ledger(RoundSettings()).nodes, Grid(clock, {11: 0, 12: 1})
    nodes.refresh(grid)
    nodes.exclude(12)
    assert nodes.refresh(grid) == [0]


def test_a_node_that_flower_no_longer_lists_is_lost(monkeypatch):
    """Flower 1.43 sends no reply for a lost node: the grid looks at get_node_ids."""
    from fedcross.engines import network_grid

    now = [0.0]
    monkeypatch.setattr(network_grid.time, "monotonic", lambda: now[0])
    inner = Grid(SimpleNamespace(now=0), {11: None, 12: None})
    inner.get_nodes = lambda: [SimpleNamespace(node_id=n, registered_at="", online_since="") for n in inner.answers]
    grid = NetworkGrid(inner)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in (11, 12)]
    ids = list(grid.push_messages(messages))
    del inner.answers[12]
    replies = []
    for step in range(12):
        now[0] = 10.0 * step
        replies += grid.pull_messages(ids)
    assert [reply.metadata.reply_to_message_id for reply in replies] == [ids[1]]
    assert replies[0].has_error()
