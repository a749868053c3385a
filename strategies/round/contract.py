"""What a method defines, in one place: read this file to add one (docs/adding-a-method.md shows it step by step).

A method says what each sampled client gets (:meth:`Contract.dispatch`), what becomes of the uploads
(:meth:`Contract.aggregate`), which model stands for it, and what it must keep to continue. What a round asks a method
beside that (whom to draw, what to expect of an upload, what to evaluate) has a default, beside the round that asks:
:mod:`strategies.round.base`, under "what a method may define".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch
from torch import nn

from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, P
from fedcross.strategies.round.federation import Federation, State
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, Spec


class Contract(ABC, Generic[P]):
    """What a method must define (the abstract ones) and declares; :class:`strategies.round.base.Method` does the rest.

    Attributes
    ----------
    params : Settings
        The method's own parameters, an instance of its ``Params``.
    federation : Federation
        How the method meets its clients.
    spec : mapping of str to (shape, dtype)
        The model's arrays, in the order of its ``state_dict``; known from :meth:`setup` on.
    parameter_names : tuple of str
        Those of them that are trained.
    """

    params: P
    federation: Federation
    spec: Spec
    parameter_names: tuple[str, ...]

    #: The class of ``params``: what a method names in brackets (``SingleModel[FedProxParams]``), or an own one.
    Params: ClassVar[type[Settings]] = Settings
    Objective: ClassVar[type[Objective]] = Objective
    #: Settings, by dotted name, that a continued run may have otherwise than before (``method.k``, say).
    may_change: ClassVar[frozenset[str]] = frozenset()
    #: Whether the defence makes sense: not where clients do not share one model's fate (references).
    defended: ClassVar[bool] = True
    #: Whether any client may train any slot, so that a lost one can be handed to another client.
    interchangeable: ClassVar[bool] = False
    #: Exchanges of messages in one global round.
    exchanges: int = 1

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Take ``Params`` from the brackets behind the base class, unless the method has its own."""
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
        """Return what each of ``current.clients`` gets, one payload per client.

        An exchange without payloads is skipped: it is not counted, and :meth:`aggregate` gets an empty list.
        """

    @abstractmethod
    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Update the server state from the accepted uploads, ordered by slot; return metrics for the round.

        Called with an empty list when every client was lost: then the state stays as it is.
        """

    @abstractmethod
    def global_model(self) -> Arrays:
        """Return the model to evaluate and to deploy."""

    @abstractmethod
    def state(self) -> State:
        """Return all that :meth:`restore` needs to continue exactly here."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Take over what :meth:`state` returned; :meth:`begin` has been called before."""

    @property
    def independent_models(self) -> int:
        """How many random initial models :meth:`start_from` must get before the first round; 0 for none."""
        return 0

    def start_from(self, models: Iterable[Arrays]) -> None:
        """Take over independently drawn initial models, in the order of the slots; only where they are asked for."""

    @classmethod
    def build_model(cls, model: nn.Module, params: P) -> nn.Module:
        """Return the network that this method trains, given the configured `model` (a head added, say)."""
        return model

    @classmethod
    def network(cls, model: nn.Module, params: P, seed: int) -> nn.Module:
        """Return :meth:`build_model`'s network; the weights that it adds to `model` depend on `seed` and nothing else.

        The CPU's global generator is borrowed for them and put back as it was, as in :func:`tasks.models.create`.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(seed, "method model"))
            return cls.build_model(model, params)

    @classmethod
    def evaluation_network(cls, network: nn.Module, params: P) -> nn.Module:
        """Return the network that :meth:`evaluation_arrays` belongs to, given the one that is trained.

        Only where inference needs more than what travels (FedFusion: the extractor of the round before).
        """
        return network
