"""Settings of a round: how long the server waits, for how many clients, and what it does about those that fail."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedcross.core.settings import Settings
from fedcross.strategies.filters.compression import Compression
from fedcross.strategies.filters.defence import Defence


class FederationSettings(Settings):
    """The group ``federation`` of a configuration."""

    min_clients: int | None = Field(
        None, ge=1, description="clients needed for a round; unset: clients_per_round, on a network half, at least two"
    )
    wait_s: float = Field(120.0, gt=0, description="seconds to wait for min_clients; on a network there is no end")
    deadline_s: float = Field(3600.0, gt=0, description="seconds until an exchange ends without the missing clients")
    min_replies: int = Field(1, ge=1, description="an exchange with fewer accepted replies counts as one without any")
    enough_replies: int | None = Field(None, ge=1, description="end an exchange after this many replies; all if unset")
    reassign: int = Field(0, ge=0, description="how often a slot whose client failed goes to a spare client")
    hedge: int = Field(0, ge=0, description="number of slots, the least recently trained, sent to a spare too")
    lead: float | None = Field(
        3.0, ge=1, description="an asynchronous client with this many times the median's visits waits; null: no limit"
    )
    resend_s: float | None = Field(
        None, gt=0, description="seconds until a request is sent again; unset: deadline_s / 3 on a network, else never"
    )
    packed: Literal["auto"] | bool = Field(
        "auto", description="send all arrays of a record as one; auto: between fedcross programs over a network"
    )


def faults_of_visits(federation: FederationSettings, defence: Defence, compression: Compression) -> list[str]:
    """Return the settings that an asynchronous method, which gets uploads one by one, cannot follow."""
    usual, faults = FederationSettings(), []
    if defence.enabled:
        faults.append("defence.enabled=true: an asynchronous method gets uploads one by one. Leave it unset.")
    if compression.down != "float32":
        faults.append(
            f"compression.down={compression.down}: asynchronous methods send full models. Compress uploads only."
        )
    rounds = ("min_replies", "enough_replies", "reassign", "hedge")
    changed = [name for name in rounds if getattr(federation, name) != getattr(usual, name)]
    return faults + [f"federation.{name}: asynchronous methods have no whole rounds. Unset it." for name in changed]


class AverageSettings(Settings):
    """Which average of the global models is evaluated and exported (:func:`strategies.round.packing.averaged`)."""

    average: Literal["none", "ema", "tail"] = Field(
        "none", description="evaluate and export an average of the rounds' global models; it is never sent to clients"
    )
    average_decay: float = Field(0.95, ge=0, lt=1, description="ema: share of the average that a round keeps")
    average_from: float = Field(0.5, ge=0, lt=1, description="tail: fraction of the rounds after which the mean begins")


class RoundSettings(FederationSettings, AverageSettings):
    """Everything that the driver of a run is set to; the same for every method.

    With ``nonce`` a reply must return the request's random nonce, which only fedcross clients do; without it any Flower
    client may reply. ``compression`` needs fedcross clients.
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
    def needed(self) -> int:
        """How many clients a round needs."""
        if self.min_clients is not None:
            return self.min_clients
        k = self.clients_per_round
        return min(k, max(2, (k + 1) // 2)) if self.networked and self.nonce else k

    @property
    def packs(self) -> bool:
        """Whether messages are packed; resolves ``auto``."""
        return self.nonce and self.networked if self.packed == "auto" else self.packed

    @classmethod
    def of(cls, config: Any, run: str, *, networked: bool) -> RoundSettings:
        """Return the settings of a run's configuration.

        On a network a process that dies can take a request with it, and nobody is told: ``resend_s`` is set there.
        """
        own = ("defence", "compression", "seed", "rounds", "clients_per_round", *AverageSettings.model_fields)
        values = {**dict(config.federation), **{name: getattr(config, name) for name in own}}
        if networked and values["resend_s"] is None:
            values["resend_s"] = values["deadline_s"] / 3
        return cls(**values, run=run, nonce=True, networked=networked)

    @model_validator(mode="after")
    def _clients_can_decode(self) -> Self:
        if not self.nonce and (self.packs or not self.compression.exact):
            raise ValueError("compression and packed messages need fedcross clients: set nonce=True")
        return self
