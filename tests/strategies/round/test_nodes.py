import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross.engines.grid import FIRST_NODE, LocalGrid
from fedcross.strategies.round import nodes as module
from fedcross.strategies.round.nodes import Nodes


class Growing:
    """Nodes of a foreign app without a query handler; more of them connect later."""

    def __init__(self, nodes):
        self.inner = LocalGrid(ClientApp(), 5, {})
        self.nodes = nodes
        self.push_messages, self.pull_messages = self.inner.push_messages, self.inner.pull_messages

    def get_node_ids(self):
        return [FIRST_NODE + i for i in self.nodes]


def test_foreign_nodes_that_join_later_get_numbers_of_their_own():
    grid, nodes = Growing([3, 4]), Nodes()
    assert nodes.refresh(grid) == [0, 1]
    grid.nodes = [0, 3, 4]
    assert nodes.refresh(grid) == [0, 1, 2]
    assert [nodes.online[i] - FIRST_NODE for i in range(3)] == [3, 4, 0]
    grid.nodes = [0, 4]
    assert nodes.refresh(grid) == [1, 2]


class Slow:
    """Two nodes of ours; what they answer, and when, is the test's to say."""

    def __init__(self):
        self.sent, self.answers = [], []

    def get_node_ids(self):
        return [11, 12]

    def push_messages(self, messages):
        before = len(self.sent)
        self.sent += messages
        return [str(number) for number in range(before, len(self.sent))]

    def pull_messages(self, message_ids):
        ready = [reply for reply in self.answers if reply.metadata.reply_to_message_id in message_ids]
        self.answers = [reply for reply in self.answers if reply not in ready]
        return ready

    def answer(self, number, content):
        self.sent[number].metadata.__dict__["_message_id"] = str(number)
        self.answers.append(Message(content, reply_to=self.sent[number]))


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(module, "QUERY_WAIT_S", 0.0)
    return Slow()


def partition(number):
    return RecordDict({"config": ConfigRecord({"partition-id": number})})


def test_an_answer_that_comes_late_counts_and_nobody_is_asked_twice_meanwhile(slow):
    nodes = Nodes()
    assert nodes.refresh(slow) == []
    slow.answer(1, partition(7))
    assert nodes.refresh(slow) == [7]
    slow.answer(0, partition(5))
    assert nodes.refresh(slow) == [5, 7]
    assert (nodes.online[5], nodes.online[7]) == (11, 12)
    assert len(slow.sent) == 2


def test_a_node_that_was_lost_is_asked_again_and_gets_no_number_of_our_making(slow):
    nodes = Nodes()
    nodes.refresh(slow)
    slow.answer(0, Error(5, "the node is gone"))
    slow.answer(1, Error(8, "its process died"))
    assert nodes.refresh(slow) == []
    nodes.refresh(slow)
    assert len(slow.sent) == 4


def test_a_query_that_is_never_answered_is_put_again(slow, monkeypatch):
    monkeypatch.setattr(module, "QUERY_OPEN_S", -1.0)
    nodes = Nodes()
    nodes.refresh(slow)
    nodes.refresh(slow)
    assert len(slow.sent) == 4


def test_a_federation_that_stays_is_not_sorted_again_and_one_that_changes_is():
    grid, nodes = LocalGrid(ClientApp(), 5, {}), Nodes()
    first = nodes.refresh(grid)
    first.clear()  # the caller's copy
    assert nodes.refresh(grid) == [0, 1, 2, 3, 4]
    grid.get_node_ids = lambda: [FIRST_NODE + i for i in (0, 2, 4)]
    assert nodes.refresh(grid) == [0, 2, 4]
    assert 1 not in nodes.online
    del grid.get_node_ids
    assert nodes.refresh(grid) == [0, 1, 2, 3, 4]
    assert 1 in nodes.online
