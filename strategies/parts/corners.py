"""One global model, of which every client trains the width that its device can hold: HeteroFL, AdaptiveFL."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Evaluation, Round, Start, Task, Upload
from fedcross.strategies.objective import P
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import Stateful
from fedcross.strategies.pool.pool import Array, Arrays
from fedcross.tasks.models.width import Width

#: ``(name, upload)`` -> which rows of an entry count, bool (rows,); None is all.
Rows = Callable[[str, Upload], Array | None]


class WidthModel:
    """One global model, and the statistics and counters of each of its `widths`, the widest first."""

    def __init__(self, start: Start, widths: Sequence[Width]) -> None:
        if start.corners is None:
            raise ConfigError("method.widths needs the network; use the command fedcross.")
        self.corners, self.widths, self.names = start.corners, list(widths), tuple(start.arrays)
        self.weights = {name: start.arrays[name].copy() for name in start.parameters}
        rest = {name: array.copy() for name, array in start.arrays.items() if name not in self.weights}
        self.statistics = {width: self.corners.corner(rest, width) for width in widths}

    def at(self, width: Width) -> Arrays:
        """Return the model of `width`, in the order of the ``state_dict``."""
        values = {**self.corners.corner(self.weights, width), **self.statistics[width]}
        return {name: values[name] for name in self.names}

    def merge(self, uploads: Sequence[Upload], shares: Sequence[float], rows: Rows | None = None) -> None:
        """Set each weight to the mean, weighted by `shares`, of the uploads that have it; statistics by width.

        Sums are float64.
        """
        for name, old in self.weights.items() if uploads else ():
            total, weights = np.zeros(old.shape), np.zeros(old.shape)
            for upload, share in zip(uploads, shares):
                part, values = self.corners.index(name, upload.task.width), upload.arrays[name].astype(np.float64)
                counted = rows(name, upload) if rows else None
                weigh = share if counted is None else share * counted.reshape(-1, *(1,) * (values.ndim - 1))
                total[part] += weigh * values
                weights[part] += weigh
            mean = np.divide(total, weights, out=old.astype(np.float64), where=weights > 0)
            self.weights[name] = mean.astype(old.dtype)
        for width, known in self.statistics.items():
            own = [(upload.arrays, share) for upload, share in zip(uploads, shares) if upload.task.width == width]
            if own and known:
                parts = [{name: arrays[name] for name in known} for arrays, _ in own]
                self.statistics[width] = weighted_mean(parts, [share for _, share in own])

    def state(self) -> dict[str, Any]:
        """Return the weights and every width's statistics, for a checkpoint."""
        return {"weights": self.weights, "statistics": self.statistics}

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class WidthState:
    """The model of all widths, and the width that each slot of this round sent."""

    model: WidthModel
    sent: dict[int, Width] = field(default_factory=dict)


S = TypeVar("S", bound=WidthState, default=WidthState)


class OneModelOfWidths(Stateful[P, S]):
    """Base of methods that define, for each client of a round, :meth:`width_for`."""

    def init(self, start: Start) -> S:
        return cast("S", self.State(WidthModel(start, self.widths(start.corners))))

    @abstractmethod
    def width_for(self, state: S, round: Round, slot: int) -> Width | None:
        """Return the width that ``round.clients[slot]`` gets; None if its device can hold none."""

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send every client the width that its device can hold; a device that can hold none is not asked."""
        sent = {width: (state.model.at(width), f"size{i}") for i, width in enumerate(state.model.widths)}
        dealt = [(i, client, self.width_for(state, round, i)) for i, client in enumerate(round.clients)]
        tasks = [Task(one, i, sent[w][0], width=w, stream=sent[w][1]) for i, one, w in dealt if w is not None]
        state.sent = {task.slot: task.width for task in tasks}
        return tasks

    def merge(self, state: S, uploads: list[Upload]) -> None:
        """Take the mean of the uploads by examples, each weight over those that have it."""
        state.model.merge(uploads, [float(upload.num_examples) for upload in uploads])

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        self.merge(state, uploads)
        idle = len(round.clients) - len(state.sent)
        return {"clients_without_a_model": float(idle)} if idle else {}

    def evaluation(self, state: S) -> Evaluation:
        return Evaluation([], {width: state.model.at(width) for width in state.model.widths})

    def global_model(self, state: S) -> Arrays:
        return state.model.at(state.model.widths[0])
