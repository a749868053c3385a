"""Replies that a test writes in a client's place."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Message

from fedcross.strategies.wire.protocol import answer
from fedcross.strategies.wire.records import Arrays


def reply(
    message: Message, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int, metrics: Mapping[str, float]
) -> Message:
    """Return the client's answer to `message`."""
    return Message(answer(message.content, arrays, extras, num_examples, metrics), reply_to=message)
