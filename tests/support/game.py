"""A method together with its state, for tests that play its rounds without clients."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from fedcross.strategies.method import Method, Round, Task, Upload
from fedcross.strategies.round.driver import Start, uniform
from fedcross.strategies.round.packing import Packed, pack, unpack
from fedcross.strategies.wire.records import Arrays


class Game:
    """Plays a method: every call is one of the method's, with the state; other names are those of the state."""

    def __init__(
        self,
        kind: type[Method],
        arrays: Arrays,
        parameters: Collection[str] | None = None,
        *,
        clients_per_round: int = 3,
        rounds: int = 8,
        seed: int = 0,
        corners: Any = None,
        **values: Any,
    ) -> None:
        self.method = kind(**values)
        names = tuple(
            name
            for name, array in arrays.items()
            if (parameters is None or name in parameters) and array.dtype.kind == "f"
        )
        self.start = Start(arrays, names, clients_per_round, rounds, seed, corners)
        self.state = self.method.init(self.start)
        self.tasks: dict[int, Task] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("state", "method"):
            raise AttributeError(name)
        return getattr(self.state, name) if hasattr(self.state, name) else getattr(self.method, name)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__.get("state")
        if name not in self.__dict__ and hasattr(state, name):
            setattr(state, name, value)
        else:
            super().__setattr__(name, value)

    def round(self, number: int, clients: Sequence[int] = (), exchange: int = 0, **values: Any) -> Round:
        """Return a round of this game."""
        s = self.start
        return Round(number, exchange, tuple(clients), s.seed, s.rounds, s.clients_per_round, **values)

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw the clients of a round."""
        count = min(self.start.clients_per_round, len(available))
        drawn = uniform(self.round(number, count=count), available)
        return self.method.sample(self.state, self.round(number, drawn, count=count), available)

    def send(self, slot: int) -> Task:
        """Dispatch one free slot, as an asynchronous run does; client 0 gets it."""
        (task,) = self.method.dispatch(self.state, self.round(1, (0,), slots=(slot,)))
        self.tasks[slot] = task
        return task

    def dispatch(self, current: Round) -> list[Task]:
        """Return the tasks, by slot."""
        current = replace(current, rounds=self.start.rounds, clients_per_round=self.start.clients_per_round)
        found = sorted(self.method.dispatch(self.state, current), key=lambda task: task.slot)
        self.tasks = {task.slot: task for task in found}
        return found

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Aggregate uploads; each answers the last task of its slot."""
        for upload in uploads:
            upload.task = self.tasks.get(upload.slot, upload.task)
        current = replace(current, rounds=self.start.rounds, clients_per_round=self.start.clients_per_round)
        return self.method.aggregate(self.state, current, uploads)

    def global_model(self) -> Arrays:
        """Return the global model."""
        return self.method.global_model(self.state)

    def checkpoint(self) -> Packed:
        """Return a copy of the packed state."""
        return copy.deepcopy(pack(self.state))

    def resume(self, packed: Packed) -> None:
        """Continue from a packed state."""
        self.state = unpack(copy.deepcopy(packed), self.method.init(self.start))
