"""What a device is told whose run ends, or is stopped, while it receives a message or sends a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.superlink.servicer.fleet import fleet_handlers as fleet

from fedcross.engines.executor import over
from tests.support.link_state import Run, opened


@pytest.fixture(params=["memory", "file"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return a run whose state is in memory, or in a database."""
    return Run(opened(None if request.param == "memory" else tmp_path / "link.db"))


def content() -> RecordDict:
    """Return what a device answers."""
    return RecordDict({"config": ConfigRecord({"answer": 1})})


def stop(run: Run) -> None:
    """Stop the run."""
    assert run.state.finish_task(run.task, SubStatus.STOPPED, "")


def stop_in_the_middle(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the run just after Flower's handlers have asked whether it is on."""
    monkeypatch.setattr(fleet, "check_abort", lambda *_: None)
    stop(run)


def confirmed(run: Run, name: str, confirm: Any) -> Any:
    asked = ConfirmMessageReceivedRequest(node=Node(node_id=run.nodes[0]), run_id=run.id, message_object_id=name)
    return confirm(request=asked, state=run.state, store=run.state.object_store)


@pytest.mark.slow
def test_a_confirmation_that_comes_after_the_end_is_taken(run: Run) -> None:
    name = run.request(run.nodes[0]).metadata.message_id
    stop(run)
    with pytest.raises(FlowerError):
        confirmed(run, name, fleet.confirm_message_received)
    assert confirmed(run, name, over.received(fleet.confirm_message_received)) is not None


def test_another_error_of_a_confirmation_stays(run: Run) -> None:
    def wrong(**_: object) -> None:
        raise FlowerError(1001, "another")

    with pytest.raises(FlowerError, match="another"):
        confirmed(run, "x", over.received(wrong))


@pytest.mark.slow
def test_a_confirmation_of_a_run_that_is_on_is_flowers(run: Run) -> None:
    name = run.request(run.nodes[0]).metadata.message_id
    confirmed(run, name, over.received(fleet.confirm_message_received))
    assert run.state.object_store.get(name) is None


@pytest.mark.slow
def test_a_reply_to_a_run_that_is_stopped_meanwhile_is_told_so_and_is_no_fault_of_the_device(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = run.nodes[0]
    reply = run.reply(run.request(node), content())
    stop_in_the_middle(run, monkeypatch)
    with pytest.raises(FlowerError, match=f"SuperNode {node}, exception: Run is finished. Stopped by user.") as told:
        run.announce(reply, node)
    assert told.value.code == over.CODE
    assert "refused a reply" not in caplog.text


@pytest.mark.slow
def test_an_object_of_a_reply_to_such_a_run_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node = run.nodes[0]
    reply = run.reply(run.request(node), content())
    answer = run.announce(reply, node)
    name = reply.metadata.message_id
    stop_in_the_middle(run, monkeypatch)
    run.state.cleanup_run(run.id)
    with pytest.raises(FlowerError) as told:
        run.put(node, answer.session_id, name, run.parts(reply)[-1].deflate())
    assert told.value.code == over.CODE


def test_a_run_that_is_on_is_told_nothing(run: Run) -> None:
    over.check(run.state, run.id, run.nodes[0])
