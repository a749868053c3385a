"""What a device may announce, and how Flower's programs start; tests/faults/test_announcements.py does it for real."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flwr
import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import HTTPException
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink import extensions
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from fedcross.engines import guarded
from fedcross.engines.executor import operators
from fedcross.engines.executor.announced import fault, limited
from fedcross.engines.executor.ledger import Ledger
from fedcross.engines.executor.replies import Refusals
from fedcross.engines.guarded import CHECKED, MOST, children, most_objects, most_runs, outliving, queued
from tests.support.fleet_door import NODE, Link, pushed
from tests.support.trees import deep, name, shared, tree, wide


def count(found: ObjectTree) -> int:
    return 1 + sum(map(count, found.children))


def places_of(link: Link, root: str) -> int:
    return count(link.object_store.get_object_tree(root))


def handler(link: Link, most: int = MOST) -> Callable[[PushMessagesRequest], Any]:
    made = limited(link.push, most, Ledger(most, 1 << 30, lambda: 0.0), Refusals())  # no time passes
    return lambda request: made(request=request, state=link)


def test_the_guard_is_compared_with_this_version_of_flower() -> None:
    assert flwr.__version__ in CHECKED, "compare the functions that it replaces"


def test_every_reply_of_ours_passes() -> None:
    arrays = ArrayRecord({f"layer{i}": flwr.app.Array(np.full(9, i, np.float32)) for i in range(500)})
    # Some of them equal the first record's, and each other.
    control = ArrayRecord({f"layer{i}": flwr.app.Array(np.full(9, i // 2, np.float32)) for i in range(500)})
    scalars = {"config": ConfigRecord({"round": 1}), "metrics": MetricRecord({"n": 1})}
    records = {"arrays": arrays, "control": control, **scalars}
    made = ObjectTree(object_id=name("message"), children=[get_object_tree(RecordDict(records))])
    assert count(made) == 1506
    assert fault(made, MOST) is None
    assert fault(made, count(made)) is None
    assert fault(made, count(made) - 1) == (413, f"more than {count(made) - 1} objects")


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (shared(3), 400),
        (shared(16), 400),
        (shared(60), 400),
        (deep(6), 400),
        (deep(95), 400),
        (wide(MOST), 413),
        (wide(100_000), 413),
        (tree("a", tree("b", tree("a"))), 400),  # a cycle
        (tree("a", tree("a")), 400),
        (tree("a", tree("b"), tree("b")), 400),
        (tree("a", tree("b", tree("c")), tree("d", tree("c", tree("e")))), 400),
    ],
)
def test_what_grows_is_refused(made: ObjectTree, status: int) -> None:
    found = fault(made, MOST)
    assert found is not None
    assert found[0] == status


@pytest.mark.parametrize("made", [deep(1), deep(5), wide(MOST - 1), shared(2)])
def test_what_does_not_grow_passes_and_is_built_as_announced(made: ObjectTree) -> None:
    link = Link()
    handler(link)(pushed(made))
    assert places_of(link, made.object_id) == count(made)


def test_a_refusal_stores_nothing_and_is_logged_with_the_node_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    link = Link()
    push = handler(link)
    for made, node in ((shared(16), NODE), (wide(MOST), NODE), (deep(9), 12)):
        with pytest.raises(HTTPException):
            push(pushed(made, node=node))
    for request in (pushed(node=12), pushed(deep(2), deep(2), node=12)):
        with pytest.raises(HTTPException) as refusal:
            push(request)
        assert refusal.value.status_code == 400
    assert not link.object_store.store
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [line.partition("node ")[2].partition(":")[0] for line in told] == ["4711", "4711", "12", "12", "12"]
    assert told[1].endswith("(2 of it, 2 in all)")
    assert told[-1].endswith("(3 of it, 5 in all)")


def test_several_harmless_announcements_do_not_grow_together() -> None:
    """Each names the last one's root at four places of its lowest level."""
    link = Link()
    push, built = handler(link), 0
    for step in range(12):
        below = tree(f"r{step - 1}")
        made = tree(f"r{step}", *(tree(f"{side}{step}", below) for side in "wxyz"))
        assert fault(made, MOST) is None
        try:
            push(pushed(made, node=step + 2))  # each answers its request
        except HTTPException:
            assert step > 0
        else:
            built = max(built, places_of(link, made.object_id))
    assert built == 9
    # In the other order the leaf is known first; what another device says hangs below it does not count yet.
    with pytest.raises(HTTPException):
        push(pushed(tree("r-1", tree("new"))))


def test_one_message_brings_one_tree_however_often_it_is_sent() -> None:
    link = Link()
    push = handler(link)
    first = pushed(tree("m", tree("a")))
    push(first)
    push(first)  # a device whose connection broke
    for other in (tree("m", tree("b")), tree("m", tree("a", tree("b"))), tree("n", tree("b"))):
        with pytest.raises(HTTPException):
            push(PushMessagesRequest(node=first.node, messages_list=first.messages_list, message_object_trees=[other]))
    assert len(link.object_store.store) == 2


def test_without_the_guard_flower_builds_what_was_not_announced() -> None:
    """The reason for all this; once it fails, look whether the guard is still needed."""
    link, made = Link(), shared(10)
    link.push(pushed(made), link)
    assert made.ByteSize() < 3000
    assert places_of(link, name("root")) == 2**11 - 1


@pytest.mark.parametrize(("text", "most"), [(None, MOST), ("", MOST), ("9", 9)])
def test_the_limit_can_be_set(text: str | None, most: int) -> None:
    assert most_objects(text) == most


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "²"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FEDCROSS_REPLY_OBJECTS"):
        most_objects(text)
    with pytest.raises(ValueError, match="FEDCROSS_REPLY_MIB"):
        guarded.most_mib(text)


def test_the_limit_of_bytes_can_be_set() -> None:
    assert [guarded.most_mib(text) for text in (None, "", "7")] == [guarded.MOST_MIB, guarded.MOST_MIB, 7]


def answers(*statuses: int) -> Callable[..., Any]:
    left = list(statuses)

    def acquire(client: object, request: str) -> str:
        assert client is left
        response = httpx.Response(left.pop(0), request=httpx.Request("POST", "https://superlink"))
        response.raise_for_status()
        return f"answer to {request}"

    return lambda wrap: wrap(acquire)(left, "request")


def test_the_superexec_outlives_errors_of_the_superlink_and_no_others() -> None:
    pauses: list[float] = []
    done = answers(500, 500, 502, 500, 500, 500, 200)(lambda call: outliving(call, pauses.append))
    assert done == "answer to request"
    assert pauses == [1, 2, 4, 8, 15, 15]
    with pytest.raises(httpx.HTTPStatusError):
        answers(404)(lambda call: outliving(call, pauses.append))


def test_functions_change_only_in_the_versions_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        fleet_handlers: "push_messages push_object pull_object get_fab get_run confirm_message_received activate_node "
        "deactivate_node pull_messages send_node_heartbeat",
        runtime_handlers: "push_messages pull_messages",
        control_handlers: "register_node stream_logs stream_run_events",
        extensions: "get_middleware",
    }
    originals = [(module, one, getattr(module, one)) for module, some in names.items() for one in some.split()]
    for module, one, original in originals:
        monkeypatch.setattr(module, one, original)  # restored at the end
    for logger in (logging.getLogger("uvicorn.access"), FLOWER_LOGGER):
        monkeypatch.setattr(logger, "filters", list(logger.filters))
    own = {
        SqlLinkState: ("initialize", "cleanup_run", "store_object", "delete_node"),
        SqlObjectStore: ("delete", "put"),
    }
    changed = [(kind, one) for kind, some in own.items() for one in some]
    for kind, one in changed:
        monkeypatch.setattr(kind, one, getattr(kind, one))
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", before := sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    monkeypatch.setattr(uvicorn, "run", uvicorn.run)
    monkeypatch.setattr(uvicorn.Server, "handle_exit", handle_exit := uvicorn.Server.handle_exit)
    monkeypatch.delenv(operators.VARIABLE, raising=False)
    monkeypatch.setattr(guarded, "version", lambda package: "1.43.0")
    assert not guarded.guard("flower-superlink", MOST)
    assert all(getattr(module, one) is original for module, one, original in originals)
    assert not any(hasattr(getattr(kind, one), "__wrapped__") for kind, one in changed)
    assert sql_mixin.SQLITE_PRAGMAS is before  # type: ignore[attr-defined]
    monkeypatch.setattr(guarded, "version", lambda package: CHECKED[-1])
    assert guarded.guard("flower-superlink", MOST)
    for module, one, original in originals:
        found = getattr(module, one)
        while found is not original:  # until it has no further one
            found = found.__wrapped__
    confirm, layers = fleet_handlers.confirm_message_received, set()
    while hasattr(confirm, "__wrapped__"):
        layers.add(confirm.__code__.co_filename.rpartition("/")[2])
        confirm = confirm.__wrapped__
    assert "over.py" in layers
    assert control_handlers.register_node.__code__.co_filename.endswith("admitted.py")
    assert [one.cls.__name__ for one in extensions.get_middleware()] == ["Entry", "Door"]
    keywords = uvicorn.run.keywords  # type: ignore[attr-defined]
    assert (keywords["http"].__name__, keywords["loop"].__name__) == ("Punctual", "loop")
    assert (keywords["ws"], keywords["proxy_headers"], keywords["timeout_graceful_shutdown"]) == ("none", True, 10)
    assert uvicorn.Server.handle_exit.__wrapped__ is handle_exit  # type: ignore[attr-defined]
    for text in ("\n\x1b[2J", "Q" * 240_000, "\u202e", "\x9b31m"):  # Flower writes these fields to its log
        for call, field, request in (
            (fleet_handlers.get_fab, "hash_str", GetFabRequest(hash_str=text)),
            (fleet_handlers.push_object, "object_id", PushObjectRequest(object_id=text)),
            (fleet_handlers.push_object, "session_id", PushObjectRequest(session_id=text)),
            (fleet_handlers.pull_object, "object_id", PullObjectRequest(object_id=text)),
        ):
            with pytest.raises(HTTPException, match=f"400: {field} of {len(text)} characters is no name"):
                call(request=request, state=None)  # type: ignore[arg-type]
        with pytest.raises(HTTPException, match="400: message_object_id of"):
            fleet_handlers.confirm_message_received(
                ConfirmMessageReceivedRequest(message_object_id=text),
                state=None,  # type: ignore[arg-type]
                store=None,  # type: ignore[arg-type]
            )
    node, bad = Node(node_id=5), "?" * 200
    counted: list[tuple[int, Callable[[], object]]] = [  # a run's program, and everything small
        (6, lambda: fleet_handlers.get_fab(GetFabRequest(node=node, hash_str=bad), None)),  # type: ignore[arg-type]
        (
            250,
            lambda: fleet_handlers.confirm_message_received(
                ConfirmMessageReceivedRequest(node=node, message_object_id=bad),
                state=None,  # type: ignore[arg-type]
                store=None,  # type: ignore[arg-type]
            ),
        ),
    ]
    for most, call_it in counted:
        for count in range(most + 1):
            with pytest.raises(HTTPException) as error:
                call_it()
            assert error.value.status_code == (400 if count < most else 503)
    nobody: Any = SimpleNamespace(get_node_id_by_public_key=lambda key: None)
    with pytest.raises(HTTPException, match="1024 bytes at most"):
        fleet_handlers.activate_node(ActivateNodeRequest(public_key=b"k" * 2000), nobody)
    assert all(hasattr(getattr(kind, one), "__wrapped__") for kind, one in changed)


def test_an_unknown_version_starts_with_a_word_about_what_is_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    entry = SimpleNamespace(load=lambda: lambda: started.append(sys.argv))
    monkeypatch.setattr(guarded, "entry_points", lambda **asked: [entry])
    monkeypatch.setattr(guarded, "version", lambda package: "1.43.0")
    monkeypatch.setattr(sys, "argv", ["guarded.py", "flower-superlink", "--host", "h"])
    with pytest.raises(SystemExit) as end:
        guarded.main()
    assert not end.value.code
    assert started == [["flower-superlink", "--host", "h"]]
    assert "unguarded" in (told := capsys.readouterr().err)
    assert "all memory" in told


def test_the_script_needs_no_fedcross_and_names_a_wrong_limit() -> None:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        guarded.command("flower-superlink"),
        env={**clean, "FEDCROSS_REPLY_OBJECTS": "few"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "FEDCROSS_REPLY_OBJECTS=few" in done.stderr
    wrong = [*guarded.command("flower-superlink")[:-1], "flower-supernode"]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "start one of" in done.stderr


def test_further_runs_wait_while_as_many_as_may_are_on() -> None:
    running, passed, asked = [1, 2], [0.0], []

    def sleep(seconds: float) -> None:
        passed[0] += seconds
        if passed[0] >= 3:
            running.pop()

    acquire = queued(lambda *arguments: asked.append(passed[0]), 2, lambda: len(running), sleep)
    acquire("client", "request")
    assert asked == [3.0]
    acquire("client", "request")
    assert asked == [3.0, 3.0]


def test_children_that_have_ended_do_not_count() -> None:
    before = children()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert children() == before + 1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its end yet
        assert children() == before


def test_how_many_runs_is_a_number_above_0() -> None:
    assert [most_runs(text) for text in (None, "", "1", "12")] == [0, 0, 1, 12]
    for wrong in ("0", "-1", "x", "1.5"):
        with pytest.raises(ValueError, match="how many runs may be on at once"):
            most_runs(wrong)
