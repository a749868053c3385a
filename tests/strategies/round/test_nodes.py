from itertools import count
from logging import ERROR
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.superlink.grid import InMemoryGrid

from fedcross.core.errors import FederationError
from fedcross.engines.grid import FIRST_NODE, LocalGrid, identify
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round import nodes as module
from fedcross.strategies.round.nodes import Nodes
from tests.support.virtual import Clock


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


class Loud(Growing):
    """Logs what Flower's simulation logs for such nodes, and something else."""

    def pull_messages(self, message_ids):
        replies = self.inner.pull_messages(message_ids)
        for _ in replies:
            log(ERROR, "An exception was raised when processing a message by %s", "RayBackend")
            log(ERROR, ValueError("No query function registered with name 'default'"))
            log(ERROR, "Traceback ...\nValueError: No query function registered with name 'default'")
            log(ERROR, "the disk is full")
        return replies

    def __init__(self, nodes):
        super().__init__(nodes)
        del self.pull_messages


def test_nodes_without_a_handler_cause_one_line_and_other_faults_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(FLOWER_LOGGER, "isEnabledFor", lambda level: True)  # other tests may have set a higher level
    monkeypatch.setattr(FLOWER_LOGGER, "handle", lambda record: FLOWER_LOGGER.filter(record) and told.append(record))
    Nodes().refresh(Loud([0, 1, 2]))
    texts = [record.getMessage() for record in told if record.levelno == ERROR]
    assert texts == ["the disk is full"] * 3
    (line,) = [record.getMessage() for record in told if "do not tell" in record.getMessage()]
    assert line.startswith("fedcross: 3 nodes do not tell their partition, they are numbered by node id.")
    assert FLOWER_LOGGER.filters == []


def test_a_wait_is_told_once(monkeypatch):
    told = []
    monkeypatch.setattr(module, "log", lambda level, text, *values: told.append(text % values))
    clock = SimpleNamespace(monotonic=count().__next__, sleep=lambda seconds: None)  # a second passes at each look
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(FederationError, match="2 clients are connected"):
        Nodes().wait_for(Growing([0, 1]), 5, 9)
    assert told[1:] == ["fedcross: 2 of 5 clients are connected, waiting 9 s"]


def test_a_simulation_with_too_few_nodes_is_told_at_once():
    inner = LocalGrid(ClientApp(), 2, {})
    grid = InMemoryGrid.__new__(InMemoryGrid)  # Flower's own, without its SuperLink
    grid.get_nodes, grid.get_node_ids = list, inner.get_node_ids
    grid.push_messages, grid.pull_messages = inner.push_messages, inner.pull_messages
    with pytest.raises(FederationError) as refused:
        Nodes().wait_for(grid, 5, 1e9)
    assert str(refused.value) == (
        "2 clients are simulated, 5 are needed, and no more will come. Say how many: "
        'flwr run --federation-config "num-supernodes=5".'
    )


class Slow:
    """Two nodes of ours; what they answer, and when, is the test's to say."""

    def __init__(self):
        self.sent, self.answers, self.answer_to = [], [], {}

    def get_node_ids(self):
        return [11, 12]

    def push_messages(self, messages):
        before = len(self.sent)
        self.sent += messages
        for number, message in enumerate(self.sent[before:], before):
            if (told := self.answer_to.get(message.metadata.dst_node_id)) is not None:
                self.answer(number, partition(told))
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


def partition(number, width=None):
    told = {} if width is None else {"device-width": width}
    return RecordDict({"config": ConfigRecord({"partition-id": number, **told})})


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


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "log", lambda _, text, *values: lines.append(text % values))
    return lines


def test_a_node_that_does_not_answer_costs_one_wait_in_all(monkeypatch, told):
    """In virtual time: node 12 takes its queries and says nothing, over an hour of rounds."""
    clock, grid, nodes = Clock(monkeypatch), Slow(), Nodes()
    grid.answer_to = {11: 5}
    assert nodes.wait_for(grid, 1, 100) == [5]
    assert clock.now == pytest.approx(module.QUERY_WAIT_S)
    for _ in range(360):
        before = clock.now
        assert nodes.wait_for(grid, 1, 100) == [5]
        assert clock.now == before
        clock.sleep(10)
    assert len(grid.sent) > 10  # it was asked again and again
    [line] = told
    assert line == "fedcross: no word from node 12 on its partition after 30 s; left out until it answers"
    grid.answer(len(grid.sent) - 1, partition(7))  # it answers after all
    assert nodes.refresh(grid) == [5, 7]


def test_before_the_first_round_slow_devices_are_waited_for_as_long_as_too_few_are_there(monkeypatch, told):
    """So the first round is drawn from all of them, however slowly the first ones start."""
    clock, grid, nodes = Clock(monkeypatch), Slow(), Nodes()
    assert nodes.refresh(grid) == []
    pull = grid.pull_messages
    grid.pull_messages = lambda ids: pull(ids) if clock.now > 50 else []
    grid.answer(0, partition(5))
    grid.answer(1, partition(7))
    assert nodes.wait_for(grid, 1, 100) == [5, 7]
    assert 50 < clock.now < 51


def test_nodes_that_come_later_are_waited_for_unless_their_keys_are_bound(monkeypatch, told):
    clock = Clock(monkeypatch)
    grid = Deployed({5: 0}, {5: ("partition-0", "2026-01")})
    nodes = Nodes()
    assert nodes.wait_for(grid, 1, 100) == [0]
    grid.silent = {8, 9}
    grid.ids.append(9)
    grid.known[9] = ("partition-1", "2026-02")
    assert nodes.refresh(grid) == [0]
    assert (clock.now, told) == (0.0, [])
    clock.sleep(module.QUERY_WAIT_S + 1)
    nodes.refresh(grid)
    assert clock.now == module.QUERY_WAIT_S + 1
    [line] = told
    assert "node 9 (partition 1) on its partition" in line
    grid.ids.append(8)  # its key is bound to none
    nodes.refresh(grid)
    assert clock.now == pytest.approx(2 * module.QUERY_WAIT_S + 1)
    [_, line] = told
    assert "node 8 on its partition" in line
    grid.answer(1, partition(1))
    assert nodes.refresh(grid) == [0, 1]
    assert nodes.online == {0: 5, 1: 9}


def test_many_silent_nodes_are_one_line(slow, told):
    nodes = Nodes()
    nodes.keys[3] = "0123456789abcdef"
    nodes._tell_silent(range(3, 11))
    nodes._tell_silent([3, 4])
    assert told == [
        "fedcross: no word from node 3 (key 0123456789abcdef), 4, 5, 6, 7 and 3 more on its partition after 0 s; "
        "left out until it answers"
    ]


def test_when_too_few_are_there_the_missing_ones_are_named_as_far_as_they_are_known(monkeypatch, told):
    """One answers, two are silent, and one that had answered is gone; of a node without key and partition its id."""
    Clock(monkeypatch)
    known = {node: (f"partition-{node - 5}", "2026-01") for node in (5, 6, 7)}
    grid, nodes = Deployed({5: 0, 6: 1}, known), Nodes()
    assert nodes.wait_for(grid, 2, 100) == [0, 1]
    nodes.keys[7] = "0123456789abcdef"
    grid.silent = {7, 8}
    grid.ids = [5, 7, 8]
    with pytest.raises(FederationError) as failure:
        nodes.wait_for(grid, 3, 100)
    assert (
        "3 are needed. Connected, but without an answer: node 7 (key 0123456789abcdef, partition 2), 8. "
        "Not connected any more: node 6 (partition 1). Start more clients"
    ) in str(failure.value)


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


class Deployed(Slow):
    """A grid that tells who is connected and what the SuperLink knows of them; nodes claim partitions at once."""

    def __init__(self, claims, known):
        super().__init__()
        identify()
        self.claims, self.known, self.ids = claims, known, list(claims)
        self.silent, self.widths = set(), {}

    def get_node_ids(self):
        return list(self.ids)

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name=name, registered_at=at) for node, (name, at) in self.known.items()]

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        for number, message in zip(ids, messages):
            if (node := message.metadata.dst_node_id) not in self.silent:
                self.answer(int(number), partition(self.claims[node], self.widths.get(node)))
        return ids


def test_the_first_holder_keeps_its_partition_while_it_is_connected():
    refused = []
    grid, nodes = Deployed({5: 3}, {}), Nodes(refused.append)
    assert nodes.refresh(grid) == [3]
    for thief in (9, 2):  # a higher and a lower id: neither counts
        grid.claims[thief] = 3
        grid.ids.append(thief)
        for _ in range(3):
            nodes.refresh(grid)
            assert nodes.online == {3: 5}
    assert refused == [3, 3]  # each claim is counted once
    grid.ids.remove(5)
    nodes.refresh(grid)
    assert nodes.online == {3: 9}  # the next one to have asked
    grid.ids.append(5)
    nodes.refresh(grid)
    assert nodes.online == {3: 9}
    assert refused == [3, 3, 3]


def test_of_two_that_are_there_from_the_start_the_one_registered_first_holds_it():
    grid = Deployed({9: 0, 5: 0, 7: 0}, {9: ("", "2026-02"), 5: ("", "2026-03"), 7: ("", "2026-01")})
    nodes = Nodes()
    nodes.refresh(grid)
    assert nodes.online == {0: 7}


def test_a_key_that_was_registered_for_a_partition_holds_it_and_no_other():
    refused = []
    grid = Deployed({9: 1, 7: 1}, {9: ("partition-1", "2026-02"), 7: ("partition-0", "2026-01")})
    nodes = Nodes(refused.append)
    nodes.refresh(grid)
    assert nodes.online == {1: 9}
    assert refused == [1]
    grid.ids.remove(9)
    nodes.refresh(grid)
    assert nodes.online == {}  # 7 is bound to 0


def test_a_key_that_was_registered_for_none_gets_no_partition_even_while_its_device_is_away():
    refused = []
    known = {5: ("", "2026-01")}
    grid, nodes = Deployed({5: 1}, known), Nodes(refused.append)
    nodes.refresh(grid)
    assert nodes.online == {1: 5}  # so far nobody's key is bound
    known |= {9: ("partition-1", "2026-02"), 7: ("partition-0", "2026-02")}
    grid.claims |= {9: 1, 7: 0}
    grid.ids += [9, 7]
    nodes.refresh(grid)
    assert nodes.online == {0: 7, 1: 9}
    assert refused == [1]
    grid.ids.remove(9)
    del known[9]  # Flower lists who is connected
    nodes.refresh(grid)
    assert nodes.online == {0: 7}


def test_after_a_restart_the_server_knows_from_one_bound_key_that_keys_are_bound():
    grid = Deployed({5: 1, 7: 0}, {5: ("", "2026-01"), 7: ("partition-0", "2026-02")})  # the device of 1 is away
    nodes = Nodes()
    nodes.refresh(grid)
    assert nodes.online == {0: 7}


def test_a_refused_claim_is_counted_in_the_rounds_report_and_logged(monkeypatch):
    told = []
    monkeypatch.setattr(module, "log", lambda _, text, *values: told.append(text % values))
    method = FedAvg(clients_per_round=1, wait_s=0.01)
    grid = Deployed({5: 0, 9: 0}, {})
    method._begin_round(1, grid)
    assert method.report.rejected == {"partition_taken": 1}
    method._begin_round(2, grid)
    assert not method.report.rejected
    assert told == ["fedcross: node 9 claims partition 0, refused: node 5 holds it"]


def test_a_node_tells_the_width_of_its_device_and_nonsense_counts_as_nothing():
    nodes = Nodes()
    for node, told in enumerate([0.4, 1, 0, 1.5, True, "0.4", float("nan"), None]):
        nodes._note_width(node, told)
        nodes.online[node + 10] = node
    assert [nodes.width(partition) for partition in range(10, 19)] == [0.4, 1.0, *[None] * 7]
    assert nodes.widths() == {10: 0.4, 11: 1.0}
    nodes._note_width(0, None)  # its node was started anew, without one
    assert nodes.width(10) is None


@pytest.mark.parametrize("lie", [0.01, None])
def test_a_device_whose_claim_is_refused_changes_no_other_devices_width(lie):
    """Its key is bound to partition 3; it answers after the honest one."""
    grid = Deployed({5: 0, 9: 0}, {5: ("partition-0", "2026-01"), 9: ("partition-3", "2026-02")})
    grid.widths = {5: 0.4, 9: lie}
    nodes = Nodes()
    assert nodes.refresh(grid) == [0]
    assert nodes.online == {0: 5}
    assert nodes.width(0) == 0.4
    assert nodes.width(3) is None
