"""AdaptiveFL: one global model, slices that begin at several depths, and clients chosen by what they could train."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.strategies.method import Round, Settings, Upload
from fedcross.strategies.parts.corners import OneModelOfWidths, WidthState
from fedcross.strategies.parts.widths import Different, Ratio, largest
from fedcross.strategies.pool.pool import Array
from fedcross.tasks.models.width import FULL, Corners, Width

#: Largest estimate of success that counts: above it, curiosity alone decides [C].
ENOUGH = 0.5
#: What an entry of the table of resources gains when a device is known to train just this model [C].
PROOF = 3.0

Starts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Different]
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=2), Different]


class AdaptiveFLParams(Settings):
    widths: Ratios = (1.0, 0.66, 0.4)
    starts: Starts = (0, 1, 2)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if 1.0 not in self.widths:
            raise ValueError(f"widths {list(self.widths)}: give 1.0, the full model, too")
        return self


@dataclass
class AdaptiveFLState(WidthState):
    """The model of all widths, what this round sent, and the two tables.

    ``resources``: client -> how much speaks for its training each width (W,), the smallest first. ``counts``: client ->
    how often it got or was to return a model of each ratio, the narrowest first, from 1.
    """

    resources: dict[int, Array] = field(default_factory=dict)
    counts: dict[int, Array] = field(default_factory=dict)


class AdaptiveFL(OneModelOfWidths[AdaptiveFLParams, AdaptiveFLState]):
    """Jia et al., AdaptiveFL, DAC 2024 (arXiv 2311.13166).

    Details from the authors' code (repository mastlab-T3S/AdaptiveFL) are marked [C].

    Each width below 1 (r_w) has one model for each start (I), the first group of channels, in forward order, that it
    cuts. A later start is a larger model; one behind the last group is left out. The authors take layers 4, 6 and 8 of
    VGG-16 and blocks 2, 3 and 4 of ResNet-18.

    Each of the round's slots draws one of the models, all equally likely, then a client with a probability
    proportional to its reward for models of that width, ``min(R_s, .5) * R_c`` [C]. R_s is the client's share of
    successes in the table of resources; ``R_c = 1/sqrt(count)`` is curiosity. No client is drawn twice. A device that
    cannot hold the model cuts it down to the largest that it can hold, and the tables learn from what it returns. The
    new value of each weight is the mean of the uploads that have it, weighted by numbers of examples.

    State: one model, statistics for every width, the two tables; clients keep none. Wire: one model down, one up.

    Deviations: the server knows the widths of the devices, and sends at once what a device would have cut the model
    down to. A device can hold the models of its width and below, from any start; the authors draw its resources anew in
    each round. A lost request counts in curiosity as an answered one, and not in the table of resources. Batch
    normalisation keeps running statistics for each width; the authors use the statistics of the batch.
    """

    def widths(self, corners: Corners | None = None) -> list[Width]:
        """Return the full model, then the widths, each with its starts, the largest model first."""
        groups = max(len(corners.hidden), 1) if corners is not None else max(self.params.starts) + 1
        if min(self.params.starts) >= groups:
            raise ConfigError(f"method.starts: this network has {groups} hidden dimensions, counted from 0.")
        ratios, starts = sorted(self.params.widths, reverse=True)[1:], sorted(self.params.starts, reverse=True)
        return [FULL, *(Width(ratio, start) for ratio in ratios for start in starts if start < groups)]

    def _draw(self, state: AdaptiveFLState, round: Round, count: int) -> list[Width]:
        """Return the model that each slot of a round draws."""
        ascending = state.model.widths[::-1]
        return [ascending[i] for i in stream(round.seed, "sizes", round.number).integers(len(ascending), size=count)]

    def sample(self, state: AdaptiveFLState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        generator = stream(round.seed, "sample", round.number)
        free, drawn = list(available), list[int]()
        for width in self._draw(state, round, round.count):
            rewards = np.array([self.reward(state, client, width.ratio) for client in free])
            chances = rewards / rewards.sum() if rewards.sum() > 0 else None
            drawn.append(free.pop(int(generator.choice(len(free), p=chances))))
        return tuple(drawn)

    def reward(self, state: AdaptiveFLState, client: int, ratio: float) -> float:
        """Return ``min(R_s, .5) * R_c`` of a client for models of width `ratio`."""
        table, counts = self._tables(state, client)
        own = [i for i, width in enumerate(state.model.widths[::-1]) if width.ratio == ratio]
        success = sum(table[i:].sum() for i in own) / (len(own) * table.sum())
        return float(min(success, ENOUGH) / np.sqrt(counts[sorted(self.params.widths).index(ratio)]))

    def _tables(self, state: AdaptiveFLState, client: int) -> tuple[Array, Array]:
        """Return a client's rows of both tables, ones at first."""
        resources = state.resources.setdefault(client, np.ones(len(state.model.widths)))
        return resources, state.counts.setdefault(client, np.ones(len(self.params.widths)))

    def width_for(self, state: AdaptiveFLState, round: Round, slot: int) -> Width | None:
        """Return the slot's model, or the largest smaller one that the device can hold."""
        widths, drawn = state.model.widths, self._draw(state, round, len(round.clients))[slot]
        return largest(widths[widths.index(drawn) :], round.budget(round.clients[slot]))

    def aggregate(self, state: AdaptiveFLState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        drawn, answered = self._draw(state, round, len(round.clients)), {upload.client for upload in uploads}
        for upload in uploads:
            self.learn(state, upload.client, drawn[upload.slot], upload.task.width)
        for slot, width in state.sent.items():
            if round.clients[slot] not in answered:
                self.learn(state, round.clients[slot], drawn[slot], width, answered=False)
        return super().aggregate(state, round, uploads)

    def learn(self, state: AdaptiveFLState, client: int, sent: Width, returned: Width, answered: bool = True) -> None:
        """Enter into the tables that a client got the model `sent` and returned (or was to) `returned` [C]."""
        table, counts = self._tables(state, client)
        place = state.model.widths[::-1].index(returned)
        if answered and returned == sent:
            table[place:] += 1
            table[place] += PROOF if sent == FULL else 0
        elif answered:
            table[place] += PROOF
            table[place + 1 :] = np.maximum(table[place + 1 :] - np.arange(1, len(table) - place), 0)
        for width in (returned, sent):
            counts[sorted(self.params.widths).index(width.ratio)] += 1
