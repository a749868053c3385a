"""What a method must define. Read this file to add a method (docs/adding-a-method.md shows it step by step).

A method defines what the server sends to each sampled client (:meth:`Contract.dispatch`), how it aggregates the uploads
(:meth:`Contract.aggregate`), which model is the global one, and which state a checkpoint must hold. For everything else
(how clients are sampled, what an upload must contain, which models are evaluated) there is a default in
:mod:`strategies.round.base`, under "what a method may define".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.strategies.parts import objective as client_halves
from fedcross.strategies.parts.objective import Objective, P
from fedcross.strategies.round.federation import Federation, State
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, Spec


class Contract(ABC, Generic[P]):
    """The abstract methods that a method defines and the attributes that it may set.

    :class:`strategies.round.base.Method` implements the rest.

    Attributes
    ----------
    params : Settings
        The method's own parameters, an instance of its ``Params``.
    federation : Federation
        How the server samples clients, waits for them and exchanges messages with them.
    spec : mapping of str to (shape, dtype)
        Names, shapes and dtypes of the model's arrays, in the order of its ``state_dict``; set before :meth:`setup`.
    parameter_names : tuple of str
        Names of the arrays that are trained.
    """

    params: P
    federation: Federation
    spec: Spec
    parameter_names: tuple[str, ...]

    #: The class of ``params``: the one in brackets behind the base class (``SingleModel[FedProxParams]``), unless the
    #: method sets its own.
    Params: ClassVar[type[Settings]] = Settings
    Objective: ClassVar[type[Objective]] = Objective
    #: Settings, by dotted name, that may change when a run is resumed (``method.k``, say).
    may_change: ClassVar[frozenset[str]] = frozenset()
    #: Whether the defence may judge the uploads. False for references whose clients do not train a common model.
    defended: ClassVar[bool] = True
    #: Medians above which the defence calls an update no honest one's, if ``defence.quarantine`` is smaller. Large for
    #: a method whose clients carry a term of their own, with which honest updates are long; the defence shortens these.
    unusual: ClassVar[float] = 1.0
    #: Whether any client may train any slot, so that another client can take over the slot of a client that failed.
    interchangeable: ClassVar[bool] = False
    #: Whether visits are handled one by one, without waiting for a round (:mod:`strategies.asynchronous.visits`).
    asynchronous: ClassVar[bool] = False
    #: Whether the method needs a model with ``features`` and ``classifier``, not only one that maps inputs to scores.
    halves: ClassVar[bool] = False
    #: Whether what counts are the clients' own models: there is no global model that they could score.
    personal: ClassVar[bool] = False
    #: Exchanges of messages in one global round.
    exchanges: int = 1

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set ``Params`` from the brackets behind the base class, unless the method defines its own."""
        super().__init_subclass__(**keywords)
        if "Params" in cls.__dict__:
            return
        for argument in (one for base in cls.__dict__.get("__orig_bases__", ()) for one in get_args(base)):
            kind = argument.__bound__ if isinstance(argument, TypeVar) else argument
            if isinstance(kind, type) and issubclass(kind, Settings):
                cls.Params = kind

    @abstractmethod
    def setup(self, arrays: Arrays) -> None:
        """Create the server state from the initial model."""

    @abstractmethod
    def dispatch(self, current: Round) -> list[Payload]:
        """Return what the server sends to ``current.clients``, at most one payload per slot.

        Several may go to one client if its visits change no state that it keeps: it stores one for each exchange. With
        ``compression.up`` it keeps a residual, so at most one may go there.

        An exchange without payloads is skipped: it is not counted, and :meth:`aggregate` gets an empty list.
        """

    @abstractmethod
    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Update the server state from the accepted uploads, ordered by slot; return metrics for the round.

        The list is empty when no client returned a valid upload; the state must then stay unchanged.
        """

    @abstractmethod
    def global_model(self) -> Arrays:
        """Return the model to evaluate and to deploy."""

    @abstractmethod
    def state(self) -> State:
        """Return everything that :meth:`restore` needs to continue from exactly this point."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned; the caller has called :meth:`begin` before."""

    @property
    def independent_models(self) -> int:
        """Number of random initial models that :meth:`start_from` needs before the first round; 0 for none."""
        return 0

    def start_from(self, models: Iterable[Arrays]) -> None:
        """Load independent random models, one per slot; called only if :meth:`independent_models` is not 0."""

    @classmethod
    def client_half(cls, params: P) -> client_halves.Objective:
        """Return what clients minimise with these settings: ``Objective``, unless a setting asks for more."""
        return cls.Objective(params)

    @classmethod
    def build_model(cls, model: nn.Module, params: P) -> nn.Module:
        """Return the network that this method trains: the configured `model`, perhaps changed (with a head, say)."""
        return model

    @classmethod
    def network(cls, model: nn.Module, params: P, seed: int) -> nn.Module:
        """Return :meth:`build_model`'s network; the weights that it adds to `model` depend on `seed` alone.

        They get the dtype of the trained weights of `model`. PyTorch's global CPU generator is seeded for them and then
        restored, as in :func:`tasks.models.create`.

        Raises
        ------
        ConfigError
            If the method needs the model's ``features`` and ``classifier``, and it has none.
        """
        if cls.halves and not {"features", "classifier"} <= dict(model.named_children()).keys():
            raise ConfigError(
                f"method {cls.__name__}: needs a model with features and classifier, {type(model).__name__} has "
                f"{', '.join(name for name, _ in model.named_children()) or 'no parts'}. docs/own-model.md shows how "
                "to write them; fedavg, fedprox, scaffold and fedcross do without."
            )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(seed, "method model"))
            own = list(model.parameters())
            built = cls.build_model(model, params)
        known = set(map(id, own))
        dtype = next((one.dtype for one in own if one.requires_grad), None)
        for added in (one for one in built.parameters() if dtype is not None and id(one) not in known):
            added.data = added.data.to(dtype)
        return built

    @classmethod
    def evaluation_network(cls, network: nn.Module, params: P) -> nn.Module:
        """Return the network that fits :meth:`evaluation_arrays`, given the `network` that clients train.

        They differ only if inference needs arrays that clients do not train (FedFusion: the last round's extractor).
        """
        return network


def refuse_taken(method: object, before: Mapping[str, Any]) -> None:
    """Raise a ConfigError if an attribute in `before`, name to value, is another object by now: two uses of a name."""
    for name, value in before.items():
        if getattr(method, name) is not value:
            raise ConfigError(
                f"{type(method).__name__}.setup sets self.{name}, and Method keeps something else under that name. "
                "Choose another name."
            )
