"""A device whose message was given up answers the next one, and nothing of the first is left.

With Flower's own state and its own functions that receive a message and send a reply; SuperLink and worker are fakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.message import remove_content_from_message
from flwr.common.constant import Status, SubStatus
from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeStateFactory

from fedcross.engines.executor import leftovers

NODE = 7


def request(run: int) -> Message:
    """Return a request of the server."""
    told = Metadata(
        run_id=run, message_id="", src_node_id=1, dst_node_id=NODE, reply_to_message_id="", group_id="",
        created_at=1.0, ttl=60.0, message_type="train",
    )  # fmt: skip
    made = make_message(metadata=told, content=RecordDict({"config": ConfigRecord({"run": run})}))
    told.__dict__["_message_id"] = made.object_id
    return made


class Device:
    """A SuperNode's loop, step by step.

    Parameters
    ----------
    flowers : bool
        Whether the loop's functions are Flower's own.
    """

    def __init__(self, *, flowers: bool = False) -> None:
        factory = ObjectStoreFactory()
        self.state: Any = NodeStateFactory(objectstore_factory=factory).state()
        self.store = factory.store()
        self.state.set_node_id(NODE)
        self.errors: list[str] = []
        for run in (1, 2):
            self.state.store_run(Run.create_empty(run))
        self._receive: Callable[..., int | None] = loop._pull_and_store_message
        self._send: Callable[..., None] = loop._push_messages
        if not flowers:
            work = leftovers.InWork()
            self._receive = leftovers.forgotten(self._receive, work)
            self._send = leftovers.answered(self._send, loop._insert_message, work)

    def receive(self, message: Message | None, pull: Callable[[Any], Any], confirm: Callable[[], Any]) -> int | None:
        """Take one turn of the loop: the SuperLink has `message`; `pull` and `confirm` are its answers."""
        objects = {} if message is None else get_all_nested_objects(message)
        found = message and (remove_content_from_message(message), get_object_tree(message))
        return self._receive(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: found,
            get_run=None,
            get_fab=None,
            pull_object=lambda run, name: pull(objects[name].deflate()),
            confirm_message_received=lambda run, name: confirm(),
            trusted_entities=None,
        )

    def work(self, message: Message) -> None:
        """Stand for the worker: store a reply to `message`."""
        loop._insert_message(Message(RecordDict({"run": ConfigRecord({})}), reply_to=message), self.state, self.store)

    def sent(self) -> list[str]:
        """Send the reply that is there; return the names of the requests that are answered."""
        told = []

        def send(reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
            told.append(reply.metadata.reply_to_message_id)
            self.errors.append(reply.error.reason if reply.has_error() else "")
            return set(get_all_nested_objects(reply) if reply.has_content() else {tree.object_id}), ""

        self._send(state=self.state, object_store=self.store, send=send, push_object=lambda *_: None)
        return told

    def unfinished(self) -> list[int]:
        """Return the runs of tasks that are not finished."""
        return [task.run_id for task in self.state.get_tasks() if task.status.status != Status.FINISHED]


def whole(content: Any) -> Any:
    """Stand for a call that succeeds."""
    return content


def over(*_: Any) -> Any:
    """Stand for status 403."""
    raise RunNotRunningException


def broken(*_: Any) -> Any:
    """Stand for another error."""
    raise ValueError("no connection")


REFUSALS = {
    "the run ends while objects are pulled": (over, whole),
    "the run ends before the confirmation": (whole, over),
    "the confirmation fails": (whole, broken),
}


@pytest.mark.parametrize("worked", ["meanwhile", "not"])
@pytest.mark.parametrize("how", REFUSALS)
def test_the_next_message_gets_its_own_answer(how: str, worked: str) -> None:
    pull, confirm = REFUSALS[how]
    device, first, second = Device(), request(1), request(2)

    def refuse() -> None:
        if worked == "meanwhile":
            device.work(first)
        confirm(None)

    assert device.receive(first, pull, refuse) is None
    assert device.unfinished() == []
    assert device.receive(None, whole, lambda: None) is None  # it asks, and there is nothing
    assert (len(device.state.msg_store), len(device.store)) == (0, 0)
    assert device.receive(second, whole, lambda: None) == 2
    assert device.unfinished() == [2]
    device.work(second)
    assert device.sent() == [second.metadata.message_id]
    assert len(device.state.msg_store) == 0


def test_a_reply_that_comes_after_its_message_was_given_up_answers_nothing() -> None:
    """The worker's call was let in just before its token was taken."""
    device, first, second = Device(), request(1), request(2)
    assert device.receive(first, whole, over) is None
    device.work(first)
    assert device.receive(second, whole, lambda: None) == 2
    device.work(second)
    assert device.sent() == [second.metadata.message_id]


def test_the_worker_finishes_the_task_of_a_message_that_was_answered() -> None:
    """Also if the device has asked for the next message before: only what was given up is ended here."""
    device, first = Device(), request(1)
    assert device.receive(first, whole, lambda: None) == 1
    device.work(first)
    assert device.sent() == [first.metadata.message_id]
    assert device.receive(None, whole, lambda: None) is None
    assert device.unfinished() == [1]


def finish(device: Device, why: str) -> None:
    """Stand for a worker that ends its task without a reply."""
    [task] = device.state.get_tasks()
    device.state.finish_task(task.task_id, sub_status=SubStatus.FAILED, details=why)


def test_a_message_whose_worker_gave_it_up_is_answered_with_an_error_and_the_next_one_with_its_reply() -> None:
    """Flower waits without an end for the reply; a message that came slower than its worker waited led there."""
    device, first, second = Device(), request(1), request(2)
    assert device.receive(first, lambda content: (finish(device, "no object came"), content)[1], lambda: None) == 1
    assert device.sent() == [first.metadata.message_id]
    assert device.errors == ["The worker ended without a reply (no object came)."]
    assert (len(device.state.msg_store), device.state.get_messages_legacy(is_reply=True)) == (0, [])
    assert device.receive(second, whole, lambda: None) == 2
    device.work(second)
    assert device.sent() == [second.metadata.message_id]
    assert device.errors[1:] == [""]


def test_a_reply_without_one_of_its_objects_is_waited_for_until_its_worker_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, first, second = Device(), request(1), request(2)
    assert device.receive(first, whole, lambda: None) == 1
    device.work(first)
    content = device.store.get
    monkeypatch.setattr(device.store, "get", lambda name: content(name) and b"")  # announced, and not there yet
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            finish(device, "killed")

    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=pause))
    assert device.sent() == [first.metadata.message_id]
    assert len(looks) == 3
    monkeypatch.undo()
    assert device.receive(second, whole, lambda: None) == 2
    device.work(second)
    assert device.sent() == [second.metadata.message_id]


def test_without_it_flowers_device_stays_one_message_behind() -> None:
    """The reason for all this; once it fails, look whether it is still needed."""
    device, first, second = Device(flowers=True), request(1), request(2)
    assert device.receive(first, whole, over) is None
    device.work(first)
    assert device.receive(second, whole, lambda: None) == 2
    assert device.sent() == [first.metadata.message_id]


def test_a_worker_that_asks_for_a_message_that_was_given_up_is_no_error() -> None:
    said = f"[/v1/runtime/pull-object][ApiError:1008] {leftovers.TAKEN}."
    for line, level in ((said, "INFO"), ("[/v1/runtime/acquire-task][ApiError:1008] another", "ERROR")):
        record = logging.LogRecord("flwr", logging.ERROR, "", 0, line, (), None)
        assert leftovers.no_error(record)
        assert (record.levelname, record.levelno) == (level, getattr(logging, level))


def test_it_is_put_into_flowers_loop_and_another_loop_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, sends = loop._pull_and_store_message, loop._push_messages
    monkeypatch.setattr(loop, leftovers.RECEIVE, plain)
    monkeypatch.setattr(loop, leftovers.SEND, sends)
    monkeypatch.setattr(FLOWER_LOGGER, "filters", [])
    leftovers.attach()
    assert FLOWER_LOGGER.filters == [leftovers.no_error]
    assert loop._pull_and_store_message.__wrapped__ is plain  # type: ignore[attr-defined]
    assert loop._push_messages.__wrapped__ is sends  # type: ignore[attr-defined]
    monkeypatch.setattr(leftovers, "import_module", lambda name: SimpleNamespace())
    leftovers.attach()
    assert "no way to receive that is known" in caplog.text
