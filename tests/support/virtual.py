"""A grid in virtual time: replies come when a script says so, and nobody really waits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Error, Message

from fedcross.engines.grid import identify
from fedcross.strategies.round import clock, exchange, nodes, slot
from fedcross.strategies.wire.records import views
from tests.support.replies import reply

#: What a client does with a request: (seconds until, reply), any number of times.
Script = Callable[[Message], Iterable[tuple[float, Message]]]


class Clock:
    """Stands for the module ``time``; sleeping moves it on."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        for module in (clock, exchange, nodes, slot):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class VirtualGrid:
    """Clients 0 to n - 1, client i on node i + 1; `scripts` says what they do, :func:`answers` unless it names one."""

    blocking = False

    def __init__(self, clock: Clock, clients: int, scripts: dict[int, Script]) -> None:
        identify()
        self.clock, self.scripts = clock, scripts
        self.partitions = {i + 1: i for i in range(clients)}
        self.online = list(self.partitions)
        self.asked: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, Message]] = []

    def get_node_ids(self) -> list[int]:
        return self.online

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"m{next(self._numbers)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            config = message.content.config_records["config"]
            self.asked.append((round(self.clock.now, 1), config["client"], config["slot"]))
            for after, answer in self.scripts.get(config["client"], answers(1))(message):
                heapq.heappush(self._coming, (self.clock.now + after, next(self._numbers), answer))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return what has come in, whether it was asked for or not."""
        arrived = []
        while self._coming and self._coming[0][0] <= self.clock.now:
            arrived.append(heapq.heappop(self._coming)[2])
        return arrived


def trained(message: Message, value: float = 1.0) -> Message:
    """Return the reply of a client that adds `value` to all it got."""
    model = {name: a.numpy() + np.float32(value) for name, a in message.content.array_records["arrays"].items()}
    return reply(message, model, {}, 10, {"train-loss": 1.0})


def answers(*seconds: float, value: float = 1.0) -> Script:
    """Answer after so many seconds, several times if there are several."""
    return lambda message: [(after, trained(message, value)) for after in seconds]


def scores(examples: int, loss: float, right: float) -> Script:
    """Answer the model after a second, with these numbers: examples, loss and local accuracy."""
    told = {"train-loss": loss, "local-accuracy": right}
    return lambda message: [(1, reply(message, views(message.content.array_records["arrays"]), {}, examples, told))]


def fails(seconds: float) -> Script:
    """Raise after so many seconds."""
    return lambda message: [(seconds, Message(Error(2, "broken"), reply_to=message))]


def silent(message: Message) -> list[tuple[float, Message]]:
    """Never answer."""
    return []


def deaf_once() -> Script:
    """Return a script that ignores its first request."""
    seen: list[int] = []
    return lambda message: answers(1)(message) if seen else seen.append(1) or []
