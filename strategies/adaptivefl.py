"""AdaptiveFL: one global model, slices that begin at several depths, and clients chosen by what they could train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.parts.widths import Width, check_widths
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.sized_model import SizedModel
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.models.slicing.plan import FULL, Size

#: Largest estimate of success that counts: above it, curiosity alone decides [C].
ENOUGH = 0.5
#: What an entry of the table of resources gains when a device is known to train just this model [C].
PROOF = 3.0


class AdaptiveFLParams(Settings):
    """Settings of AdaptiveFL.

    Parameters
    ----------
    widths : tuple of float
        The paper's r_w: the widths of large, medium and small models. Width 1 must be among them.
    starts : tuple of int
        The paper's I: index of the first group of channels that a slice cuts, counted in the order of the forward pass.
        Each width below 1 has one model for each start; a later start is a larger model. A start behind the last group
        would be the full model and is left out. The authors take layers 4, 6 and 8 of VGG-16 and blocks 2, 3 and 4 of
        ResNet-18.
    """

    widths: tuple[Width, ...] = (1.0, 0.66, 0.4)
    starts: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_widths(self.widths)
        if 1.0 not in self.widths or len(self.widths) < 2:
            raise ValueError(f"widths {list(self.widths)}: give 1.0, the full model, and a smaller one at least")
        if len(set(self.starts)) < len(self.starts):
            raise ValueError(f"starts {list(self.starts)}: one of them is there twice")
        return self


class AdaptiveFL(SizedModel[AdaptiveFLParams]):
    """Jia et al., AdaptiveFL, DAC 2024 (arXiv 2311.13166).

    Details from the authors' code (repository mastlab-T3S/AdaptiveFL) are marked [C].

    Each of the round's slots draws one of the models, all equally likely, then a client with a probability
    proportional to its reward for models of that width, ``min(R_s, .5) * R_c`` [C]. R_s is the client's share of
    successes in the table of resources; ``R_c = 1/sqrt(count)`` is curiosity. No client is drawn twice. A device that
    cannot hold the model cuts it down to the largest that it can hold, and the tables learn from what it returns. The
    new value of each weight is the mean of the uploads that have it, weighted by numbers of examples.

    State: one model, statistics for every size, the two tables; clients keep none. Wire: one slice down, one up.

    Deviations:

    - The server knows the widths of the devices, and sends at once what a device would have cut the model down to. The
      tables see the model that was drawn. So the traffic that the paper counts as wasted does not arise.
    - A device can hold the models of its width and below, from any start. The authors draw a device's resources anew in
      each round from a normal distribution around its class.
    - The authors' code knows no lost replies. Here a request that brought nothing that was accepted counts in
      curiosity as one that did, or else a device that never answers would be asked more and more often. The table of
      resources learns from accepted uploads only.
    - Batch normalisation keeps running statistics for each size; the authors use the statistics of the batch in
      training and testing alike.
    """

    def setup(self, arrays: Arrays) -> None:
        """Start with tables of ones."""
        super().setup(arrays)
        self._ascending = list(reversed(self.sizes))
        self._types = sorted(self.params.widths)
        #: Client -> how much speaks for its training each model, the smallest model first.
        self.resources: dict[int, NDArray[np.float64]] = {}
        #: Client -> how often it got a model of each width or was to return one, the narrowest first; from 1.
        self.counts: dict[int, NDArray[np.float64]] = {}
        self._drawn: dict[int, Size] = {}

    @property
    def sizes(self) -> Sequence[Size]:
        """The full model, then the widths, each with its starts, the largest model first."""
        widths = [width for width in sorted(self.params.widths, reverse=True) if width < 1]
        groups = len(self.sliced.groups)
        starts = [start for start in sorted(self.params.starts, reverse=True) if start < groups]
        return [FULL, *(Size(width, start) for width in widths for start in starts)]

    def check_budgets(self) -> None:
        """Raise a ConfigError if no slice cuts anything, or no device can hold a model."""
        if min(self.params.starts) >= (groups := len(self.sliced.groups)):
            raise ConfigError(
                f"method.starts={list(self.params.starts)}: this network has {groups} group{'s' * (groups != 1)} of "
                "channels, counted from 0, so every slice would be the full model. 0 cuts all."
            )
        super().check_budgets()

    def budget_remarks(self) -> list[str]:
        """Return remarks on devices that can hold no model, and on starts behind the network's last group."""
        groups, found = len(self.sliced.groups), super().budget_remarks()
        if behind := [start for start in self.params.starts if start >= groups]:
            found.append(
                f"method.starts={list(self.params.starts)}: this network has {groups} group{'s' * (groups != 1)} of "
                f"channels, counted from 0. A model that cuts from group {behind} on would be the full one, so there "
                "are none of these."
            )
        return found

    def _models(self, number: int, count: int) -> list[Size]:
        """Return the model that each slot of a round draws."""
        draw = stream(self.federation.seed, "sizes", number).integers(len(self._ascending), size=count)
        return [self._ascending[i] for i in draw]

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw a client for each slot, by its reward for the slot's model."""
        count = min(self.federation.clients_per_round, len(available))
        generator = stream(self.federation.seed, "sample", number)
        free, drawn = list(available), list[int]()
        for size in self._models(number, count):
            rewards = np.array([self.reward(client, size.width) for client in free])
            chances = rewards / rewards.sum() if rewards.sum() > 0 else None
            drawn.append(free.pop(int(generator.choice(len(free), p=chances))))
        return tuple(drawn)

    def reward(self, client: int, width: float) -> float:
        """Return ``min(R_s, .5) * R_c`` of a client for models of `width`."""
        table = self._resources(client)
        own = [i for i, size in enumerate(self._ascending) if size.width == width]
        success = sum(table[i:].sum() for i in own) / (len(own) * table.sum())
        return float(min(success, ENOUGH) / np.sqrt(self._counts(client)[self._types.index(width)]))

    def _resources(self, client: int) -> NDArray[np.float64]:
        return self.resources.setdefault(client, np.ones(len(self._ascending)))

    def _counts(self, client: int) -> NDArray[np.float64]:
        return self.counts.setdefault(client, np.ones(len(self._types)))

    def size_for(self, slot: int, client: int) -> Size | None:
        """Return the slot's model, or the largest smaller one that the device can hold."""
        wanted = self._drawn[slot]
        return self.largest(self.budget(client), self.sizes[self.sizes.index(wanted) :])

    def dispatch(self, current: Round) -> list[Payload]:
        """Draw the models of this round and send them."""
        self._drawn = dict(enumerate(self._models(current.number, len(current.clients))))
        return super().dispatch(current)

    def weight(self, upload: Upload) -> float:
        """Return the upload's number of examples."""
        return float(upload.num_examples)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the mean, and learn who returned what, and who was asked in vain."""
        for upload in uploads:
            self.learn(upload.client, self._drawn[upload.slot], self._slots[upload.slot])
        answered = {upload.client for upload in uploads}
        for slot, size in self._slots.items():
            if (client := current.clients[slot]) not in answered:
                self._count(client, self._drawn[slot], size)
        return super().aggregate(current, uploads)

    def learn(self, client: int, sent: Size, returned: Size) -> None:
        """Enter into the tables that a client got the model `sent` and returned `returned` [C]."""
        table = self._resources(client)
        place = self._ascending.index(returned)
        if returned == sent:
            table[place:] += 1
            table[place] += PROOF if sent == FULL else 0
        else:
            table[place] += PROOF
            punishment = np.arange(1, len(table) - place)
            table[place + 1 :] = np.maximum(table[place + 1 :] - punishment, 0)
        self._count(client, sent, returned)

    def _count(self, client: int, sent: Size, returned: Size) -> None:
        """Enter into curiosity's table that a client got the model `sent`, to return the model `returned`."""
        for size in (returned, sent):
            self._counts(client)[self._types.index(size.width)] += 1

    def state(self) -> State:
        """Return the model, the statistics and the two tables."""
        state = super().state()
        tables = {"resources": self.resources, "counts": self.counts}
        plain = {name: {str(c): row.tolist() for c, row in table.items()} for name, table in tables.items()}
        return State(state.arrays, {**state.values, **plain})

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.resources, self.counts = (
            {int(client): np.array(row) for client, row in state.values[name].items()}
            for name in ("resources", "counts")
        )
