"""What the base of all methods works with: the rules of the federation, its record of a round, its state on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from fedcross.core.settings import Settings
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.defence import Defence
from fedcross.strategies.wire.compression import Compression
from fedcross.strategies.wire.protocol import Round, Upload


class Meeting(Settings):
    """How long the server waits, for how many clients, and what it does about those that fail or are slow.

    The one place of these settings: ``federation`` in a configuration is a ``Meeting``, and every method's
    :class:`Federation` is one with more fields.
    """

    min_clients: int | None = Field(
        None, ge=1, description="clients that must be connected before a round; clients_per_round if unset"
    )
    wait_s: float = Field(120.0, gt=0, description="seconds to wait for min_clients")
    deadline_s: float = Field(3600.0, gt=0, description="seconds until an exchange ends without the missing clients")
    min_replies: int = Field(1, ge=1, description="with fewer accepted replies an exchange changes nothing")
    enough_replies: int | None = Field(None, ge=1, description="end an exchange with so many; all of them if unset")
    reassign: int = Field(0, ge=0, description="times a slot whose client failed goes to a spare client")
    hedge: int = Field(0, ge=0, description="slots, the stalest ones, that a spare client is asked for too")
    resend_s: float | None = Field(None, gt=0, description="ask a client once more that was silent for so long")
    packed: Literal["auto"] | bool = Field(
        "auto", description="all arrays of a record travel as one; auto: between fedcross programs over a network"
    )


class Federation(Meeting):
    """How a method meets its clients; the same for every method.

    `clients_per_round` clients are drawn each round. A round ends after `deadline_s` seconds at the latest
    (:mod:`strategies.round.exchange`). `nonce` asks for fedcross clients, which echo the request's random nonce;
    without it any Flower client may answer. `defence` is against poisoned uploads (:mod:`strategies.round.defence`).
    `compression` (:mod:`strategies.wire.compression`) needs fedcross clients.
    """

    seed: int = Field(0, ge=0)
    rounds: int = Field(1, ge=1, description="planned global rounds")
    clients_per_round: int = Field(10, ge=1)
    run: str = Field("", description="identity of the run, bound into every message")
    nonce: bool = Field(False, description="ask for fedcross clients, which send the request's random number back")
    networked: bool = Field(False, description="clients are reached over a network, not part of this machine")
    defence: Defence = Defence()
    compression: Compression = Compression()

    @property
    def packs(self) -> bool:
        """Whether messages are packed, ``auto`` decided."""
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
    """All that resume needs: arrays by name, and JSON values."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class RoundReport:
    """What one global round cost and gave; the source of one line of ``metrics.jsonl``."""

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
    metrics: dict[str, float] = field(default_factory=dict)


class ReplyLog(Protocol):
    """Keeps what the rounds since the last checkpoint have accepted (:mod:`server.reply_log`)."""

    def available(self, number: int) -> list[int] | None:
        """Return the partitions that round `number` was drawn from before the server died, None if it was not."""

    def draw(self, number: int, available: Sequence[int]) -> None:
        """Keep what round `number` is drawn from."""

    def accepted(self, current: Round) -> list[Upload]:
        """Return what was accepted in this exchange before the server died."""

    def accept(self, current: Round, upload: Upload) -> None:
        """Keep `upload`; when it returns, it is on disk."""

    def is_over(self, current: Round) -> bool:
        """Return whether the exchange had ended before the server died: who is missing is lost."""

    def end(self, current: Round) -> None:
        """Keep that the exchange has ended."""
