"""Replies that a test writes in a client's place."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Message

from fedcross.strategies.method import Task
from fedcross.strategies.wire.records import Arrays, Payload, answer


def payload_of(task: Task) -> Payload:
    """Return an uncoded task as it is sent."""
    return Payload(task, task.arrays, task.arrays)


def reply(
    message: Message, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int, metrics: Mapping[str, float]
) -> Message:
    """Return the client's answer to `message`."""
    return Message(answer(message.content, arrays, extras, num_examples, metrics), reply_to=message)
