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
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings, parse
from fedcross.strategies import objective as client_halves
from fedcross.strategies.objective import P
from fedcross.strategies.wire.records import Arrays, Spec, spec_of
from fedcross.tasks.models.width import FULL, Corners, Width

#: Type of a method's state.
S = TypeVar("S", default=Any)
Scalar = int | float | str | bool
#: The stream of the global model, for methods that also send models of their slots.
GLOBAL = "global"


@dataclass(frozen=True)
class Start:
    """What a method begins with.

    Attributes
    ----------
    arrays, parameters : Arrays, tuple of str
        The initial model, in the order of its ``state_dict`` (copy it), and the names of the trained entries.
    clients_per_round, rounds, seed : int
        K, the planned global rounds, the run's seed.
    corners : Corners or None
        Shapes of the model at every width; None if the run has full models only.
    independent : callable or None
        ``i -> Arrays``, the i-th random initial model, for methods that start from different ones.
    """

    arrays: Arrays
    parameters: tuple[str, ...]
    clients_per_round: int = 10
    rounds: int = 1
    seed: int = 0
    corners: Corners | None = None
    independent: Callable[[int], Arrays] | None = None

    @property
    def spec(self) -> Spec:
        """Name -> (shape, dtype) of the model's arrays."""
        return spec_of(self.arrays)


@dataclass(frozen=True)
class Round:
    """One exchange of messages with the sampled clients.

    Attributes
    ----------
    number, exchange : int
        The global round from 1, the exchange within it from 0. An asynchronous run counts, in place of exchanges, the
        dispatches (``sample`` and ``dispatch``) and the arrivals (``aggregate``) of a round.
    clients, count : tuple of int, int
        The sampled partition ids, in the order of the draw; for ``sample``: how many to draw.
    seed, rounds, clients_per_round : int
        The run's seed, its planned rounds, and K; the latter two may change when a run is resumed.
    slots, last : tuple of int, bool
        For an asynchronous method: the free slots, ascending, one for each client; whether this is the round's last
        ``aggregate``.
    budgets : mapping of int to float
        Client -> width of the model that its device can hold, of all connected clients; see :meth:`budget`.
    """

    number: int
    exchange: int
    clients: tuple[int, ...]
    seed: int
    rounds: int = 1
    clients_per_round: int = 10
    count: int = 0
    slots: tuple[int, ...] = ()
    budgets: Mapping[int, float] = field(default_factory=dict)
    last: bool = True

    def budget(self, client: int) -> float:
        """Return the width of the model that a client's device can hold, 1 if nobody has said otherwise."""
        return self.budgets.get(client, 1.0)


@dataclass(frozen=True)
class Task:
    """The training of one model at one client: what the server sends, and what it expects back.

    Attributes
    ----------
    client, slot : int
        Partition id, and the method's index of the model (a row of the pool, say); at most one task for a slot.
    arrays, width : Arrays, Width
        The model. An asynchronous method must not change these arrays before the upload has come.
    extras, config : mappings
        Named groups of further arrays; scalars for the client. ``epochs`` and ``lr`` replace those of the run.
    returns : mapping of str to Spec
        Groups of arrays that the client must send beside its model: name -> shapes and dtypes.
    stream : str
        Whose next state this is, for the error feedback of compression: ``GLOBAL``, a name, or "" for the slot's own.
    fixed, version : bool, int
        Whether only this client may train the model, and no spare one; a number of the method's own.
    """

    client: int
    slot: int
    arrays: Arrays
    extras: Mapping[str, Arrays] = field(default_factory=dict)
    config: Mapping[str, Scalar] = field(default_factory=dict)
    width: Width = FULL
    returns: Mapping[str, Spec] = field(default_factory=dict)
    stream: str = ""
    fixed: bool = False
    version: int = 0


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
    """A client's answer to one task. It is exactly what the task asked for; arrays are read-only views of the message.

    Attributes
    ----------
    client, slot, arrays, extras
        Who trained which model, the trained model, and the groups that ``task.returns`` asked for.
    num_examples, metrics : int, mapping of str to float
        n_k, 1 or more; what the client measured, finite.
    task, seconds : Task, float
        What it answers; from dispatch to arrival on the run's clock, in asynchronous runs.
    nbytes, scales, trace
        For the driver: bytes received, scales of coded arrays, origin.
    """

    client: int
    slot: int
    arrays: Arrays
    extras: Mapping[str, Arrays]
    num_examples: int
    metrics: Mapping[str, float]
    task: Task = field(default_factory=lambda: Task(-1, -1, {}))
    seconds: float = 0.0
    nbytes: int = 0
    scales: Arrays = field(default_factory=dict)
    trace: Trace | None = None


@dataclass(frozen=True)
class Evaluation:
    """The models to evaluate.

    Attributes
    ----------
    models : list of Arrays
        Their mean score on the test set is the round's score; empty: the round has none.
    widths, clients : dict of Width to Arrays
        The global model of every width, the widest first, where a method has several: the widest one's score is the
        round's. The same as weights of the networks that clients train, if those compute something else (HeteroFL).
    """

    models: list[Arrays]
    widths: dict[Width, Arrays] = field(default_factory=dict)
    clients: dict[Width, Arrays] | None = None


class Method(ABC, Generic[P, S]):
    """Base of all methods: ``class NAME(Method[NAMEParams, NAMEState])`` in ``strategies/NAME.py``.

    ``init`` makes the state, a dataclass. Its fields are arrays, numbers, strings, None, lists, tuples, sets and
    dictionaries of these, dataclasses and pools; ``aggregate`` may change it in place. One function packs any such
    state into a checkpoint and back (:mod:`strategies.round.packing`). `params` can be given by their names.
    """

    #: Class of ``params``: the first one in the brackets behind the base class.
    Params: ClassVar[type[Settings]] = Settings
    #: What a client minimises, with the same parameters.
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
        """Draw ``round.count`` of the `available` partition ids (ascending); uniformly without replacement."""
        keys = (round.number, round.exchange) if round.exchange else (round.number,)
        drawn = stream(round.seed, "sample", *keys).choice(len(available), size=round.count, replace=False)
        return tuple(available[i] for i in drawn)

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
