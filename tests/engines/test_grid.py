import bdb
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross.engines import grid as engine_grid
from fedcross.engines.grid import FIRST_NODE, RUN_ID, SERVER_NODE, LocalGrid, serve


@pytest.fixture
def grid():
    app = ClientApp()

    @app.query()
    def query(message, context):
        if context.node_config["partition-id"] == 2:
            raise ValueError("broken device")
        seen = context.state.config_records.setdefault("seen", __import__("flwr").app.ConfigRecord({"count": 0}))
        seen["count"] += 1
        return Message(RecordDict({"seen": seen}), reply_to=message)

    return LocalGrid(app, 3, {"overrides": ""})


def ask(grid, *partitions):
    return [Message(RecordDict(), dst_node_id=FIRST_NODE + p, message_type="query") for p in partitions]


def test_every_message_is_answered_under_its_id(grid):
    messages = ask(grid, 0, 1)
    ids = list(grid.push_messages(messages))
    replies = [*grid.pull_messages(ids), *grid.pull_messages(ids)]
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert list(grid.pull_messages(ids)) == []


def test_what_is_forgotten_is_neither_done_nor_kept(grid):
    first, second, third = grid.push_messages(ask(grid, 1, 1, 0))
    grid.forget([first, "unknown"])
    (reply,) = grid.pull_messages([first, second])
    assert (reply.metadata.reply_to_message_id, reply.content.config_records["seen"]["count"]) == (second, 1)
    grid.forget([second, third])
    assert list(grid.pull_messages([third])) == []
    assert grid._queue == {}


def test_an_exception_in_a_client_is_an_error_reply_as_in_flower(grid):
    (reply,) = grid.send_and_receive(ask(grid, 2))
    assert reply.has_error()
    assert reply.error.code == 2
    assert "broken device" in str(reply.error.reason)


def test_a_nodes_state_lives_across_messages(grid):
    for expected in (1, 2):
        (reply,) = grid.send_and_receive(ask(grid, 1))
        assert reply.content.config_records["seen"]["count"] == expected


def test_all_nodes_are_there(grid):
    assert sorted(grid.partitions[node] for node in grid.get_node_ids()) == [0, 1, 2]


def test_older_apps_make_their_messages_here(grid):
    content = RecordDict()
    message = grid.create_message(content, "query", FIRST_NODE + 1, "group", ttl=5.0)
    assert message.content is content
    found = message.metadata
    assert (found.message_type, found.dst_node_id, found.group_id, found.ttl) == ("query", FIRST_NODE + 1, "group", 5.0)


def test_the_server_gets_the_grid_and_the_jobs_overrides(grid):
    seen = []
    job = SimpleNamespace(server_app=lambda *given: seen.append(given), overrides="task=digits")
    serve(job, grid)
    [(found, context)] = seen
    assert found is grid
    assert context.run_config == {"overrides": "task=digits"}
    assert (context.run_id, context.node_id) == (RUN_ID, SERVER_NODE)


def test_the_first_exception_is_printed_with_its_traceback_and_q_in_a_debugger_ends_the_run(caplog, monkeypatch):
    monkeypatch.setattr(engine_grid, "_printed", set())

    def app(message, context):
        if message.content["config"]["do"] == "quit":
            raise bdb.BdbQuit
        raise NameError("typo")

    grid = LocalGrid(app, 1, {})
    for _ in range(2):
        [reply] = grid.send_and_receive([told("raise")])
        assert reply.error.code == engine_grid.CLIENT_APP_RAISED
    assert caplog.text.count("in app\n") == 1
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive([told("quit")])


def told(what):
    return Message(RecordDict({"config": ConfigRecord({"do": what})}), FIRST_NODE, "train")
