"""Data of every method's round: settings of the federation, the report of a round, the state of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from fedcross.core.errors import StorageError
from fedcross.core.settings import Settings
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.wire.compression import Compression
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Spec


class Meeting(Settings):
    """How long the server waits, for how many clients, and what it does about clients that fail or are slow.

    ``federation`` in a configuration is a ``Meeting``; every method's :class:`Federation` adds fields to it.
    """

    min_clients: int | None = Field(
        None, ge=1, description="clients that must be connected before a round; clients_per_round if unset"
    )
    wait_s: float = Field(120.0, gt=0, description="seconds to wait for min_clients")
    deadline_s: float = Field(3600.0, gt=0, description="seconds until an exchange ends without the missing clients")
    min_replies: int = Field(1, ge=1, description="an exchange with fewer accepted replies counts as one without any")
    enough_replies: int | None = Field(None, ge=1, description="end an exchange after this many replies; all if unset")
    reassign: int = Field(0, ge=0, description="how often a slot whose client failed goes to a spare client")
    hedge: int = Field(0, ge=0, description="number of slots, the least recently trained, sent to a spare too")
    lead: float | None = Field(
        3.0,
        ge=1,
        description="a client of an asynchronous run that has made this many times the visits of the others' median "
        "waits for others; null: no limit",
    )
    resend_s: float | None = Field(None, gt=0, description="seconds without a reply until a request is repeated")
    packed: Literal["auto"] | bool = Field(
        "auto", description="send all arrays of a record as one; auto: between fedcross programs over a network"
    )


class Federation(Meeting):
    """How the server samples clients, waits for them and exchanges messages with them; the same for every method.

    The server draws `clients_per_round` clients each round. Each exchange of a round ends after `deadline_s` seconds at
    the latest (:mod:`strategies.round.exchange`). With `nonce` a reply must return the request's random nonce, which
    only fedcross clients do; without it any Flower client may reply. `defence` is against poisoned uploads
    (:mod:`strategies.defence.rules`). `compression` (:mod:`strategies.wire.compression`) needs fedcross clients.
    """

    seed: int = Field(0, ge=0)
    rounds: int = Field(1, ge=1, description="planned global rounds")
    clients_per_round: int = Field(10, ge=1)
    run: str = Field("", description="identity of the run, part of every message")
    nonce: bool = Field(False, description="accept only replies that return the request's random number")
    networked: bool = Field(False, description="clients are connected over a network, not on this machine")
    defence: Defence = Defence()
    compression: Compression = Compression()

    @property
    def packs(self) -> bool:
        """Whether messages are packed; resolves ``auto``."""
        return self.nonce and self.networked if self.packed == "auto" else self.packed

    @model_validator(mode="after")
    def _clients_can_decode(self) -> Self:
        if not self.compression.exact and not self.nonce:
            raise ValueError("compression needs fedcross clients on the same configuration: set nonce=True")
        if self.packs and not self.nonce:
            raise ValueError("packed messages need fedcross clients: set nonce=True")
        return self


@dataclass
class State:
    """Everything that a resumed run needs: arrays by name, and JSON values."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def fitted(self, spec: Spec) -> State:
        """Return this state for a run whose model has `spec`; scalars that were stored as lists of one are scalars.

        Earlier versions stored all scalars so.

        Raises
        ------
        StorageError
            If it is the state of another model.
        """
        model = {name: (tuple(shape), str(dtype)) for name, (shape, dtype) in self.values.get("_model", spec).items()}
        if other := sorted(name for name in spec.keys() | model.keys() if spec.get(name) != model.get(name)):
            raise StorageError(_differs(other[0], model.get(other[0]), spec.get(other[0])))
        arrays, scalars = self.arrays, {name for name, (shape, _) in spec.items() if not shape}
        if scalars and not any(array.ndim == 0 for array in arrays.values()):
            lists = {n: a for n, a in arrays.items() if a.shape == (1,) and _entry(n, spec) in scalars}
            arrays = {**arrays, **{n: a.reshape(()) for n, a in lists.items()}}
        for name, wanted in spec.items():
            held = arrays.get(f"model.{name}")
            if held is not None and (held.shape, str(held.dtype)) != wanted:
                raise StorageError(_differs(name, (held.shape, str(held.dtype)), wanted))
        return State(arrays, self.values)


def _entry(name: str, spec: Spec) -> str | None:
    """Return the entry of the model that a checkpoint's array `name`, ``GROUP.ENTRY``, is of; None if of none."""
    while name not in spec:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name


def _differs(name: str, stored: Any, wanted: Any) -> str:
    """Return what to say of the model's entry `name`, (shape, dtype) or None for none."""
    there, here = ("no such entry" if one is None else f"shape {one[0]} {one[1]}" for one in (stored, wanted))
    return (
        f"the checkpoint's model has {name!r} with {there}, this run's with {here}. Continue with the model that the "
        "run began with."
    )


@dataclass
class RoundReport:
    """Costs and metrics of one global round; they become one line of ``metrics.jsonl``."""

    round: int
    clients: int = 0
    dropped: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    clipped: int = 0
    lightened: int = 0
    spares: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    train_loss: float | None = None
    seconds_training: float = 0.0
    seconds_aggregation: float = 0.0
    #: Size -> accepted replies, of the sizes that went out; only where models have several.
    width_replies: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)


class ReplyLog(Protocol):
    """Stores the uploads accepted since the last checkpoint (:mod:`server.reply_log`)."""

    def available(self, number: int) -> list[int] | None:
        """Return the partitions that round `number` was drawn from before a crash; None if it was not drawn yet."""

    def widths(self, number: int) -> dict[int, float] | None:
        """Return the widths that devices had told when round `number` was drawn; None if they were not stored."""

    def draw(self, number: int, available: Sequence[int], widths: Mapping[int, float] | None = None) -> None:
        """Store the partitions that round `number` is drawn from, and the devices' widths if it depends on them."""

    def accepted(self, current: Round) -> list[Upload]:
        """Return the uploads that this exchange had accepted before the server crashed."""

    def accept(self, current: Round, upload: Upload) -> None:
        """Store `upload`; it is on disk when this method returns."""

    def is_over(self, current: Round) -> bool:
        """Return whether the exchange had ended before the server crashed; slots without an upload are then lost."""

    def end(self, current: Round, at: float | None = None) -> None:
        """Store that the exchange has ended, and when, in seconds of the run's clock, if it has one."""

    def order(self) -> list[tuple[int, int, float | None]]:
        """Return round, exchange and time of each upload and end, in the order in which they were stored."""
