"""One global model of which every client trains the width that its device can hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Method, Round, Start, Task, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.pool.pool import Array, Arrays
from fedcross.tasks.models.width import Width


class WidthModel:
    """One global model, and the statistics and counters of each of its widths.

    Parameters
    ----------
    start : Start
        The initial model, full, and the shapes at every width.
    widths : sequence of Width
        The widths, the widest first.
    """

    def __init__(self, start: Start, widths: Sequence[Width]) -> None:
        if start.corners is None:
            raise ConfigError("method.widths needs the network; use the command fedcross.")
        self.corners, self.widths, self.names = start.corners, list(widths), tuple(start.arrays)
        self.weights = {name: start.arrays[name].copy() for name in start.parameters}
        rest = {name: array for name, array in start.arrays.items() if name not in self.weights}
        self.statistics = {
            width: {name: array.copy() for name, array in self.corners.corner(rest, width).items()} for width in widths
        }

    def at(self, width: Width) -> Arrays:
        """Return the model of `width`, in the order of the ``state_dict``."""
        values = {**self.corners.corner(self.weights, width), **self.statistics[width]}
        return {name: values[name] for name in self.names}

    def merge(
        self,
        uploads: Sequence[Upload],
        shares: Sequence[float],
        rows: Callable[[str, Upload], Array | None] | None = None,
    ) -> None:
        """Set each weight to the mean of the uploads that have it, weighted by `shares`; others stay.

        ``rows(name, upload)`` may say which rows of an entry count, bool (rows,); None is all. Statistics become means
        among the uploads of one width. Sums are float64.
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
        for width in {upload.task.width for upload in uploads}:
            own = [(upload, share) for upload, share in zip(uploads, shares) if upload.task.width == width]
            parts = [{name: upload.arrays[name] for name in self.statistics[width]} for upload, _ in own]
            if parts[0]:
                self.statistics[width] = weighted_mean(parts, [share for _, share in own])

    def state(self) -> dict[str, Array]:
        """Return the weights and every width's statistics as arrays, for a checkpoint."""
        found = {f"weights.{name}": array for name, array in self.weights.items()}
        for width, own in self.statistics.items():
            found |= {f"statistics.{width.text}.{name}": array for name, array in own.items()}
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load what :meth:`state` returned."""
        self.weights = {name: state[f"weights.{name}"] for name in self.weights}
        for width, own in self.statistics.items():
            self.statistics[width] = {name: state[f"statistics.{width.text}.{name}"] for name in own}


@dataclass
class WidthState:
    """The model of all widths, and how many clients of this round got none."""

    model: WidthModel
    idle: int = 0


P = TypeVar("P", bound=Settings, default=Any)
S = TypeVar("S", bound=WidthState, default=Any)


class OneModelOfWidths(Method[P, S]):
    """Base of methods with one global model, of which every client trains the width that its device can hold.

    A method defines :meth:`widths` and :meth:`width_for`.
    """

    def init(self, start: Start) -> S:
        """Return the initial model at every width."""
        return cast("S", WidthState(WidthModel(start, self.widths(start.corners))))

    @abstractmethod
    def width_for(self, state: S, round: Round, slot: int) -> Width | None:
        """Return the width that ``round.clients[slot]`` gets; None if its device can hold none."""

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send every client the width that its device can hold; a device that can hold none is not asked."""
        found = {slot: self.width_for(state, round, slot) for slot in range(len(round.clients))}
        dealt = {slot: width for slot, width in found.items() if width is not None}
        state.idle = len(found) - len(dealt)
        models = {width: state.model.at(width) for width in set(dealt.values())}
        places = {width: f"size{place}" for place, width in enumerate(state.model.widths)}
        return [
            Task(round.clients[slot], slot, models[width], width=width, stream=places[width])
            for slot, width in dealt.items()
        ]

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the mean of the uploads, each weight over those that have it."""
        state.model.merge(uploads, [float(upload.num_examples) for upload in uploads])
        return {"clients_without_a_model": float(state.idle)} if state.idle else {}

    def evaluation(self, state: S) -> Evaluation:
        """Return the global model of every width."""
        return Evaluation([], {width: state.model.at(width) for width in state.model.widths})

    def global_model(self, state: S) -> Arrays:
        """Return the global model of the largest width."""
        return state.model.at(state.model.widths[0])
