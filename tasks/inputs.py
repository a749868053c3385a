"""A client's inputs on the device that trains on them: prepared, or on a GPU bytes that are prepared when looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcross.tasks.reading.params import Normalise


class Prepare:
    """:class:`tasks.reading.params.Normalise` for tensors of bytes on a device, equal to it to the bit.

    Both multiply and then add, in float32. Two of them are equal if they do the same, so they can be part of a key.
    """

    def __init__(self, normalise: Normalise, dimensions: int, device: torch.device) -> None:
        self._what = normalise, dimensions, device
        # Made once: a recorded step cannot copy numbers from the host.
        self._factor, self._offset = (term.to(device) for term in normalise.terms(dimensions))

    def __call__(self, held: Tensor) -> Tensor:
        """Return bytes (n, ...) as a new float32 tensor in the same memory layout."""
        return held.to(torch.float32).mul_(self._factor).add_(self._offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prepare) and self._what == other._what

    def __hash__(self) -> int:
        return hash(self._what)


@dataclass(frozen=True, eq=False)
class Inputs:
    """One row per example; ``inputs[rows]`` returns prepared ones.

    ``held`` (n, ...) lies on the device: prepared inputs, or uint8 pictures that `prepare` prepares.
    """

    held: Tensor
    prepare: Prepare | None = None

    @classmethod
    def of(
        cls, raw: npt.NDArray[np.generic], prepare: Callable[[npt.NDArray[np.generic]], Tensor], device: torch.device
    ) -> Inputs:
        """Return a task's inputs `raw` (n, ...) on `device`; bytes stay bytes on a GPU if `prepare` normalises them."""
        if device.type == "cuda" and raw.dtype == np.uint8 and isinstance(prepare, Normalise):
            held = torch.from_numpy(np.array(raw)).to(device)  # a copy: the raw array is a read-only map
            return cls(held, Prepare(prepare, raw.ndim, device))
        return cls(prepare(raw).to(device))

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return the prepared inputs of `rows`: a slice, or int64 (batch,)."""
        return self.ready(self.held[rows])

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.held.nbytes

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and type of a row, and its preparation: equal for inputs that can share a recorded step or a stack."""
        return tuple(self.held.shape[1:]), self.held.dtype, self.prepare

    def ready(self, held: Tensor) -> Tensor:
        """Return rows of ``held`` prepared."""
        return held if self.prepare is None else self.prepare(held)

    def like(self, held: Tensor) -> Inputs:
        """Return other rows of the same kind."""
        return Inputs(held, self.prepare)
