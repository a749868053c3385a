"""Bases of methods with one global model: by rounds, the mean of the uploads replaces it; or upload by upload."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, cast, get_args

import numpy as np
from typing_extensions import TypeVar

from fedcross.strategies.method import GLOBAL, Method, Round, S, Start, Task, Upload
from fedcross.strategies.objective import P
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.pool.pool import Arrays


class Stateful(Method[P, S]):
    """Base of methods whose ``init`` is written already: a method names its state's class in the brackets behind it."""

    State: ClassVar[type[Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set ``State`` from the brackets behind the base class."""
        super().__init_subclass__(**keywords)
        for argument in (one for base in cls.__dict__.get("__orig_bases__", ()) for one in get_args(base)):
            kind = argument.__bound__ if isinstance(argument, TypeVar) else argument
            if is_dataclass(kind):
                cls.State = cast("type[Any]", kind)


@dataclass
class ModelState:
    """The global model, the names of its parameters, and N, the most clients that were connected at a draw."""

    model: Arrays
    parameters: tuple[str, ...] = field(default=(), kw_only=True)
    population: int = field(default=0, kw_only=True)


M = TypeVar("M", bound=ModelState, default=ModelState)


class SingleModel(Stateful[P, M]):
    """Base of methods with one global model: every client gets it, the mean of the uploads replaces it.

    Weights and batch-normalisation statistics are averaged alike. A round without uploads changes nothing. A method
    that does more with the uploads defines :meth:`step`.
    """

    #: Weights of the mean, ``examples`` or ``uniform``, unless the method has a setting of this name.
    weighting: ClassVar[str] = "examples"
    #: Fields of the state that are vectors, one value for each parameter, zero at first.
    zeros: ClassVar[tuple[str, ...]] = ()

    def init(self, start: Start) -> M:
        model = {name: array.copy() for name, array in start.arrays.items()}
        vectors = {one: {name: np.zeros_like(model[name]) for name in start.parameters} for one in self.zeros}
        return cast("M", self.State(model, **vectors, parameters=start.parameters))

    def sample(self, state: M, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        state.population = max(state.population, len(available))
        return round.clients

    def dispatch(self, state: M, round: Round) -> list[Task]:
        return to_all(state.model, round)

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return each upload's weight in the mean: n_k, or 1 with ``weighting=uniform``."""
        uniform = getattr(self.params, "weighting", self.weighting) == "uniform"
        return [1.0 if uniform else float(upload.num_examples) for upload in uploads]

    def aggregate(self, state: M, round: Round, uploads: list[Upload]) -> dict[str, float]:
        if not uploads:
            return {}
        sent, state.model = state.model, weighted_mean([upload.arrays for upload in uploads], self.weights(uploads))
        return self.step(state, round, uploads, sent) or {}

    def step(self, state: M, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float] | None:
        """Go on from ``state.model``, the mean of the `uploads` (one or more) of the model `sent`; return metrics."""
        return None

    def global_model(self, state: M) -> Arrays:
        return state.model


def to_all(model: Arrays, round: Round, **fields: Any) -> list[Task]:
    """Return a task with the global `model` for every client of the round; `fields` are further fields of it."""
    return [Task(client, slot, model, stream=GLOBAL, **fields) for slot, client in enumerate(round.clients)]


@dataclass
class AsyncState(ModelState):
    """The global model, and how often the server has changed it."""

    version: int = 0


A = TypeVar("A", bound=AsyncState, default=AsyncState)


class AsyncSingle(SingleModel[P, A]):
    """Base of asynchronous methods with one global model, which every free slot sends as it then is."""

    asynchronous = True

    def dispatch(self, state: A, round: Round) -> list[Task]:
        pairs = zip(round.slots, round.clients)
        return [Task(client, slot, state.model, version=state.version) for slot, client in pairs]

    def aggregate(self, state: A, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the uploads one after another; those of the same virtual time by slot."""
        for upload in uploads:
            self.take(state, upload, state.version - upload.task.version)
        return {}

    @abstractmethod
    def take(self, state: A, upload: Upload, staleness: int) -> None:
        """Use one upload of a client that got ``upload.task.arrays``, `staleness` changes of the model ago.

        The arrays of ``state.model`` are replaced and never changed in place, because slots still send them.
        """
