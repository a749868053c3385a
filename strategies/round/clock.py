"""Clocks of a run: how long a visit takes in virtual time, in real time, or as the record of an earlier run says.

A *visit* is one request to a client and its reply. On the virtual clock the configuration says how long each visit
takes, so a run on one machine shows what slow devices cost, and its result depends on nothing but the configuration.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings

if TYPE_CHECKING:
    from fedcross.strategies.round.slot import Slot

Pairs = tuple[tuple[float, float], ...] | None
PerClass = tuple[float, ...] | None
#: How far the shares of a device mix may sum to something else than 1, for rounding.
TOLERANCE = 1e-6


class ClockSettings(Settings):
    """The clock of the run: how long visits take, and in which order an asynchronous method handles them."""

    name: Literal["none", "virtual", "real", "replay"] = Field(
        "none",
        description="none; virtual: seconds drawn from devices; real: as they arrive; replay: as an earlier run says",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        description="a visit that takes longer counts as lost (asynchronous methods); unset: none on a virtual clock, "
        "federation.deadline_s on the real one",
    )
    events: str | None = Field(None, description="clock=replay: the visits.jsonl of the run to repeat")

    @model_validator(mode="after")
    def _replay_has_events(self) -> Self:
        if (self.name == "replay") != (self.events is not None):
            raise ValueError("events: clock=replay and clock.events=RUN/visits.jsonl belong together: give both")
        return self


class Devices(Settings):
    """A mix of device classes, dealt to the clients: how long they compute, and how long they send and receive.

    Each client gets one class for computing, which also decides its width, and independently one for communication.
    """

    name: str = "equal"
    shares: tuple[float, ...] = Field((1.0,), description="share of the clients in each class; they sum to 1")
    training: Pairs = Field(None, description="[mean, standard deviation] of a visit's seconds, a pair for each class")
    communication: Pairs = Field(None, description="the same for the seconds of communication; unset: none")
    seconds_per_example: PerClass = Field(
        None, description="instead of training: seconds for one example in one epoch, for each class"
    )
    bytes_per_second: PerClass = Field(None, description="instead of communication: rate of the link, for each class")
    least: float = Field(1.0, gt=0, description="training and communication drawn shorter than this take this long")
    widths: PerClass = Field(None, description="width of the model that a device of each class can train; unset: 1")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not self.shares or min(self.shares) < 0 or abs(sum(self.shares) - 1) > TOLERANCE:
            raise ValueError(f"shares {list(self.shares)}: they must be 0 or more and sum to 1")
        for pair in (("training", "seconds_per_example"), ("communication", "bytes_per_second")):
            if all(getattr(self, name) is not None for name in pair):
                raise ValueError(f"give {' or '.join(pair)}, not both")
        for name in ("training", "communication", "seconds_per_example", "bytes_per_second", "widths"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.shares):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.shares)} shares; give one for each")
            for value in values or ():
                first, deviation = value if isinstance(value, tuple) else (value, 0.0)
                if first <= 0 or deviation < 0 or (name == "widths" and first > 1):
                    raise ValueError(f"{name} {value}: above 0, a deviation 0 or more, a width at most 1")
        return self


class VirtualClock:
    """Draws how long each visit takes.

    `devices` are dealt to so many `clients` by the run's `seed`; `examples` has the number of examples of each client,
    `epochs` are those of a visit. A visit of more than `deadline_s` virtual seconds is lost.
    """

    def __init__(
        self, devices: Devices, seed: int, clients: int, examples: Sequence[int] = (), epochs: int = 1,
        deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        self.devices, self.seed, self.deadline_s = devices, seed, deadline_s
        self.examples, self.epochs = tuple(examples), epochs
        #: Class of each client's processor, and of its link.
        self.processors = deal(devices.shares, clients, stream(seed, "devices", 0))
        self.links = deal(devices.shares, clients, stream(seed, "devices", 1))

    def seconds(self, client: int, visit: int, nbytes: int, epochs: Any = None) -> float:
        """Return how long visit number `visit` of `client` takes, with `nbytes` sent in both directions together.

        `epochs` is for a visit with another number of local epochs than the clock's.
        """
        devices, draw = self.devices, stream(self.seed, "duration", client, visit)
        processor, link = (classes[client % len(classes)] for classes in (self.processors, self.links))
        compute = devices.least
        if devices.seconds_per_example is not None:
            examples = self.examples[client % len(self.examples)] if self.examples else 1
            compute = examples * int(epochs or self.epochs) * devices.seconds_per_example[processor]
        elif devices.training is not None:
            compute = max(devices.least, float(draw.normal(*devices.training[processor])))
        if devices.bytes_per_second is not None:
            return compute + nbytes / devices.bytes_per_second[link]
        if devices.communication is not None:
            return compute + max(devices.least, float(draw.normal(*devices.communication[link])))
        return compute

    def longest(self, slots: Iterable[Slot]) -> float:
        """Return how long the slowest client of an exchange takes."""
        sent = [(one.payload, one.payload.task, one.visit) for one in slots]
        sizes = [payload.nbytes + payload.reply_nbytes for payload, *_ in sent]
        seconds = [
            self.seconds(t.client, visit, size, t.config.get("epochs")) for (_, t, visit), size in zip(sent, sizes)
        ]
        return max(seconds, default=0.0)

    def plan(self, index: int, client: int, visit: int, start: float, nbytes: int) -> tuple[float, bool]:
        """Return when a visit ends, and whether its client is asked: not if it cannot meet the deadline."""
        seconds = self.seconds(client, visit, nbytes)
        late = self.deadline_s is not None and seconds > self.deadline_s
        return start + (self.deadline_s or 0.0 if late else seconds), not late


class RealClock:
    """Takes visits in the order in which they arrive; time is what this machine's clock says."""

    def __init__(self, deadline_s: float | None = None) -> None:
        self.deadline_s = deadline_s
        self._origin: float | None = None

    def now(self, last: float) -> float:
        """Return the seconds since the run's start, later than `last`, the time of the last event."""
        if self._origin is None:
            self._origin = time.monotonic() - last
        return max(time.monotonic() - self._origin, math.nextafter(last, math.inf))

    def plan(self, index: int, client: int, visit: int, start: float, nbytes: int) -> tuple[float, bool]:
        """Return infinity, because nobody knows when the visit ends, and True."""
        return math.inf, True


class ReplayClock:
    """Repeats the visits of an earlier run: the same clients, in the same order, with the same ones lost.

    `events` has the line of ``visits.jsonl`` of each visit that had ended with that run.
    """

    def __init__(self, events: Mapping[int, Mapping[str, Any]]) -> None:
        self.events, self.last = events, max(events)

    @classmethod
    def read(cls, path: Path) -> ReplayClock:
        """Return the clock that repeats the visits in the file at `path`; a StorageError if it is no such record."""
        try:
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            events = {int(line["visit"]): line for line in lines}
            if not events or not all({"slot", "client", "start", "finish"} <= one.keys() for one in events.values()):
                raise ValueError("no record of visits")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StorageError(f"clock.events={path}: not a readable visits.jsonl ({error}). Name a run's.") from error
        return cls(events)

    def plan(self, index: int, client: int, visit: int, start: float, nbytes: int) -> tuple[float, bool]:
        """Return when the visit ended in the earlier run, and whether it was accepted."""
        event = self.events[index]
        if (finish := float(event["finish"])) < start:
            raise ConfigError(
                f"clock.events: visit {index} of the record ended after {finish:.5g} s, and begins here after "
                f"{start:.5g} s. So this is another run: give method, seed, clients and slots of the recorded one."
            )
        return finish, bool(event.get("accepted"))


Clock = VirtualClock | RealClock | ReplayClock


def budgets_of(devices: Devices, seed: int, clients: int) -> dict[int, float]:
    """Return the width of each client's device; empty if the mix says nothing of widths."""
    if devices.widths is None:
        return {}
    classes = deal(devices.shares, clients, stream(seed, "devices", 0))
    return {client: devices.widths[one] for client, one in enumerate(classes)}


def deal(shares: Sequence[float], clients: int, generator: np.random.Generator) -> list[int]:
    """Return the class of each client: as many of each as `shares` says, rounded by largest remainder, shuffled."""
    exact = np.asarray(shares) * clients
    counts = np.floor(exact + 1e-9).astype(int)
    counts[np.argsort(-(exact - counts), kind="stable")[: clients - counts.sum()]] += 1
    return [int(one) for one in generator.permutation(np.repeat(np.arange(len(shares)), counts))]


def clock_of(
    settings: ClockSettings, devices: Devices, seed: int, examples: Sequence[int], epochs: int,
    asynchronous: bool = True,
) -> Clock | None:  # fmt: skip
    """Return the clock that the configuration names, for clients with these `examples` per epoch; None for none.

    A synchronous method has no deadline on the virtual clock: a round lasts as long as its slowest client.
    """
    if settings.name == "real":
        return RealClock(settings.deadline_s)
    if settings.events is not None:
        return ReplayClock.read(Path(settings.events))
    limit = settings.deadline_s if asynchronous else None
    virtual = settings.name == "virtual"
    return VirtualClock(devices, seed, max(len(examples), 1), examples, epochs, limit) if virtual else None
