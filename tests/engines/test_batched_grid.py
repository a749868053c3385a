"""The batched engine's grid alone: which messages it answers together, with what, and which one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross.core.errors import FederationError
from fedcross.engines import batched
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.engines.grid import FIRST_NODE
from fedcross.engines.job import Job

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    return reply(message, "alone", context)


def reply(message: Message, how: str, context: Context) -> Message:
    found = ConfigRecord({"how": how, "who": context.node_config["partition-id"], "run": str(context.run_config)})
    return Message(RecordDict({"found": found}), reply_to=message)


class Together:
    """Answers train messages at once and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None, bool]] = []

    def __call__(
        self, messages: list[Message], contexts: list[Context], memory: int | None, graph: bool
    ) -> list[Message]:
        self.asked.append((len(messages), memory, graph))
        return [reply(one, "together", context) for one, context in zip(messages, contexts, strict=True)]


def ask(kind: str, *clients: int) -> list[Message]:
    return [Message(RecordDict(), dst_node_id=FIRST_NODE + client, message_type=kind) for client in clients]


def answers(replies: Sequence[Message]) -> list[tuple[Any, Any]]:
    found = [reply.content.config_records["found"] for reply in replies]
    assert {str(one["run"]) for one in found} <= {"{'overrides': 'x'}"}
    return [(one["how"], one["who"]) for one in found]


def opened(together: Together, **settings: Any) -> BatchedGrid:
    return BatchedGrid(app, 5, {"overrides": "x"}, together, Params(**settings))


def test_train_messages_are_answered_together_and_others_one_by_one() -> None:
    together = Together()
    grid = opened(together)
    messages = [*ask("train", 3), *ask("query", 2), *ask("train", 0), *ask("query", 4)]
    expected = [("together", 3), ("together", 0), ("alone", 2), ("alone", 4)]
    assert answers(list(grid.send_and_receive(messages))) == expected
    assert answers(list(grid.send_and_receive(ask("query", 1)))) == [("alone", 1)]
    assert together.asked == [(2, None, True)]  # nothing is asked for no message


def test_a_pull_answers_those_that_are_queued_and_asked_for_once() -> None:
    grid = opened(Together())
    first, second = grid.push_messages(ask("train", 0, 1))
    assert answers(list(grid.pull_messages(["nobody's", second]))) == [("together", 1)]
    assert answers(list(grid.pull_messages([first, second]))) == [("together", 0)]
    assert list(grid.pull_messages([first, second])) == []


def test_a_run_serves_such_a_grid_and_needs_an_app_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(batched, "serve", lambda *given: served.append(given))
    together = Together()

    def job(answer: Together | None) -> Job:
        return Job("x", 3, Params(memory_gib=1), None, app, Path(), Path(), None, answer)  # type: ignore[arg-type]

    with pytest.raises(FederationError, match="engine=local"):
        batched.run(job(None))
    assert served == []
    batched.run(job(together))
    ((given, grid),) = served
    assert given == job(together)
    assert len(grid.partitions) == 3
    assert answers(list(grid.send_and_receive(ask("train", 2)))) == [("together", 2)]
    assert together.asked == [(1, 2**30, True)]
