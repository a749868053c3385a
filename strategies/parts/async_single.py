"""Base of asynchronous methods with one global model."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import TypeVar

from fedcross.strategies.method import Method, Round, Start, Task, Upload
from fedcross.strategies.objective import P
from fedcross.strategies.wire.records import Arrays


@dataclass
class AsyncState:
    """The global model, and how often the server has changed it."""

    model: Arrays
    version: int = 0


A = TypeVar("A", bound=AsyncState, default=Any)


class AsyncSingle(Method[P, A]):
    """Base of asynchronous methods with one global model, which every free slot sends as it then is.

    A method defines :meth:`take`. Uploads that arrive at the same virtual time are taken by slot.
    """

    asynchronous = True

    def init(self, start: Start) -> A:
        """Keep a copy of the initial model as the global one."""
        return cast("A", AsyncState({name: array.copy() for name, array in start.arrays.items()}))

    def dispatch(self, state: A, round: Round) -> list[Task]:
        """Send the model as it is now."""
        pairs = zip(round.slots, round.clients)
        return [Task(client, slot, state.model, version=state.version) for slot, client in pairs]

    def aggregate(self, state: A, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the uploads one after another."""
        for upload in uploads:
            self.take(state, upload, state.version - upload.task.version)
        return {}

    @abstractmethod
    def take(self, state: A, upload: Upload, staleness: int) -> None:
        """Use one upload of a client that got ``upload.task.arrays``, `staleness` changes of the model ago.

        The arrays of ``state.model`` are replaced and never changed in place, because slots still send them.
        """

    def global_model(self, state: A) -> Arrays:
        """Return the global model."""
        return state.model
