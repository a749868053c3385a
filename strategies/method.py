"""The contract of a method: four functions over an explicit state.

A method holds its parameters and nothing else. What its server knows is a dataclass, which :meth:`Method.init` makes
and the driver keeps, checkpoints and hands back. A method never sees messages: its uploads have been checked already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, cast, get_args

from torch import nn
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings as Settings
from fedcross.core.settings import parse
from fedcross.strategies import objective as client_halves
from fedcross.strategies.objective import P
from fedcross.strategies.wire.records import Arrays as Arrays
from fedcross.strategies.wire.records import Spec, spec_of
from fedcross.tasks.models.width import FULL, Corners, Width
from fedcross.tasks.scoring import Evaluation as Evaluation

#: Type of a method's state.
S = TypeVar("S", default=Any)
Scalar = int | float | str | bool
#: The stream of the global model, for methods that also send models of their slots.
GLOBAL = "global"


@dataclass(frozen=True)
class Start:
    """What a method begins with."""

    arrays: Arrays  # the initial model, in the order of its state_dict; copy it
    parameters: tuple[str, ...]  # names of the trained entries
    clients_per_round: int = 10  # K
    rounds: int = 1
    seed: int = 0
    corners: Corners | None = None  # shapes of the model at every width; None: full models only
    independent: Callable[[int], Arrays] | None = None  # i -> the i-th random initial model

    @property
    def spec(self) -> Spec:
        """Name -> (shape, dtype) of the model's arrays."""
        return spec_of(self.arrays)


@dataclass(frozen=True)
class Round:
    """One exchange of messages with the sampled clients.

    An asynchronous run counts, in place of exchanges, the dispatches (``sample`` and ``dispatch``) and the arrivals
    (``aggregate``) of a round.
    """

    number: int  # the global round, from 1
    exchange: int  # within the round, from 0
    clients: tuple[int, ...]  # the sampled partition ids, in the order of the draw; for sample a uniform draw
    seed: int
    rounds: int = 1  # planned; it and K may change when a run is resumed
    clients_per_round: int = 10  # K
    count: int = 0  # for sample: how many to draw
    slots: tuple[int, ...] = ()  # asynchronous: the free slots, ascending, one for each client
    budgets: Mapping[int, float] = field(default_factory=dict)  # connected client -> width that its device can hold
    last: bool = True  # asynchronous: whether this is the round's last aggregate

    def budget(self, client: int) -> float:
        """Return the width of the model that a client's device can hold, 1 if nobody has said otherwise."""
        return self.budgets.get(client, 1.0)


@dataclass(frozen=True)
class Task:
    """The training of one model at one client: what the server sends, and what it expects back."""

    client: int  # partition id
    slot: int  # the method's index of the model (a row of the pool, say); at most one task for a slot
    arrays: Arrays  # the model; an asynchronous method must not change these before the upload has come
    extras: Mapping[str, Arrays] = field(default_factory=dict)  # named groups of further arrays
    config: Mapping[str, Scalar] = field(default_factory=dict)  # ``epochs`` and ``lr`` replace those of the run
    width: Width = FULL
    returns: Mapping[str, Spec] = field(default_factory=dict)  # groups that the client must send beside its model
    stream: str = ""  # whose next state it is, for error feedback: GLOBAL, a name, or "" for the slot's own
    fixed: bool = False  # whether only this client may train the model, and no spare one
    version: int = 0  # a number of the method's own


@dataclass(frozen=True)
class Trace:
    """Where an accepted upload came from, for the audit trail: node, digests, seconds on the way, bytes sent to it."""

    node: int
    sent: str
    received: str
    seconds: float
    down: int


@dataclass
class Upload:
    """A client's answer to one task. It is exactly what was asked for; arrays are read-only views of the message."""

    client: int
    slot: int
    arrays: Arrays
    extras: Mapping[str, Arrays]  # the groups of ``task.returns``
    num_examples: int  # n_k, 1 or more
    metrics: Mapping[str, float]  # finite
    task: Task = field(default_factory=lambda: Task(-1, -1, {}))
    seconds: float = 0.0  # asynchronous: from dispatch to arrival on the run's clock
    nbytes: int = 0  # the rest is for the driver: bytes received, scales of coded arrays, origin
    scales: Arrays = field(default_factory=dict)
    trace: Trace | None = None


class Method(ABC, Generic[P, S]):
    """Base of all methods: ``class NAME(Method[NAMEParams, NAMEState])`` in ``strategies/NAME.py``.

    ``init`` makes the state, a dataclass of what :mod:`strategies.round.packing` packs; ``aggregate`` may change it in
    place. `params` can be given by their names.
    """

    #: Class of ``params``: the first one in the brackets behind the base class; what a client minimises with them.
    Params: ClassVar[type[Settings]] = Settings
    Objective: ClassVar[type[client_halves.Objective]] = client_halves.Objective
    #: Settings, by dotted name, that may change when a run is resumed (``method.k``, say).
    may_change: ClassVar[frozenset[str]] = frozenset()
    #: Whether visits are handled one by one, without waiting for a round.
    asynchronous: ClassVar[bool] = False
    #: Whether updates of different clients can be compared, as the defence does.
    comparable: ClassVar[bool] = True
    #: Whether only the clients' own models count: there is no global model that they could score.
    personal: ClassVar[bool] = False

    def __init__(self, params: P | None = None, **values: Any) -> None:
        faults: list[str] = []
        checked = params if params is not None else cast("P | None", parse(self.Params, values, "", faults))
        if checked is None or faults:
            raise ConfigError([f"{type(self).__name__}: {fault}" for fault in faults])
        self.params: P = checked

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set ``Params`` from the brackets behind the base class."""
        super().__init_subclass__(**keywords)
        for argument in (one for base in cls.__dict__.get("__orig_bases__", ()) for one in get_args(base)):
            kind = argument.__bound__ if isinstance(argument, TypeVar) else argument
            if "Params" not in cls.__dict__ and isinstance(kind, type) and issubclass(kind, Settings):
                cls.Params = kind

    @abstractmethod
    def init(self, start: Start) -> S:
        """Return the server's state before the first round."""

    @abstractmethod
    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Return what goes to ``round.clients``, at most one task a slot, the least recently trained model first."""

    @abstractmethod
    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Change `state` by the uploads, by slot (a lost slot has none), and return metrics of the round."""

    @abstractmethod
    def global_model(self, state: S) -> Arrays:
        """Return the model to evaluate and to deploy."""

    # ---- optional ---------------------------------------------------------------------------------------------

    def sample(self, state: S, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Return the clients that take part: ``round.clients``, drawn uniformly, or as many other `available` ones."""
        return round.clients

    def evaluation(self, state: S) -> Evaluation:
        """Return the models to evaluate; the global one."""
        return Evaluation([self.global_model(state)])

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        """Return the network that clients train, made from the configured `model` (with a head, say).

        With `deployed`, `model` is that network, and the one to return fits :meth:`global_model`.
        """
        return model

    def exchanges(self, clients_per_round: int) -> int:
        """Return how many exchanges of messages one global round has."""
        return 1

    def widths(self, corners: Corners | None = None) -> list[Width]:
        """Return every width that the method's models have, the widest first; empty if all are full."""
        return [Width(ratio) for ratio in sorted(getattr(self.params, "widths", ()), reverse=True)]

    def objective(self) -> client_halves.Objective:
        """Return what clients minimise with these parameters."""
        return self.Objective(self.params)
