"""Settings that data sets share, and the last steps from arrays to a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.tasks.base import Examples, IntArray

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


NO_AUGMENTATION = {"crop": 0, "crop_padding": "zero", "resized_crop": False, "flip": False, "rotate": 0}


class LimitParams(Settings):
    """Settings of every data set.

    Attributes
    ----------
    limit : int or None
        Keep this many training examples (a fixed random choice), for tests and quick trials.
    limit_test : int or None
        The same for the central test set.
    """

    limit: int | None = Field(default=None, ge=1)
    limit_test: int | None = Field(default=None, ge=1)


class FileParams(LimitParams):
    """Settings of data sets that live in files.

    Attributes
    ----------
    root : Path
        Folder with the published files; each task module says which.
    download : bool
        Fetch missing files (with progress bar and checksum) where the publisher offers them.
    """

    root: Path
    download: bool = False


class ImageParams(LimitParams):
    """Settings of image data sets.

    Attributes
    ----------
    mean, std : tuple of float
        Per channel, or one value for all: the model sees ``(x / scale - mean) / std`` with x / scale in [0, 1].
        A negative `std` inverts the picture, as the FedCross authors do for FEMNIST.
    augment : mapping or None
        Settings of ``fedcross.tasks.augment.Augment``, training only; None for none.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> ImageParams:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}: give one each per channel")
        if 0.0 in self.std:
            raise ValueError("std has a zero: no division by it is possible")
        return self

    def normaliser(self, channels: int, scale: float = 255.0) -> Normalise:
        """Return `prepare` for images of `channels` channels whose raw values end at `scale`."""
        if len(self.mean) not in (1, channels):
            raise ConfigError(
                f"task.mean has {len(self.mean)} values but the images have {channels} channels. Give 1 or {channels}."
            )
        return Normalise(self.mean, self.std, scale)

    def augmentation(self) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None:
        """Return the configured augmentation, None if nothing is asked for."""
        if self.augment is None or self.augment.items() <= NO_AUGMENTATION.items():
            return None  # without importing torch
        from fedcross.tasks.augment import build

        return build(self.augment)


@dataclass(frozen=True)
class Normalise:
    """Raw images to float32: ``(x / scale - mean) / std`` per channel. Picklable.

    The input has shape ``(n, channels, height, width)`` or, for plain feature vectors, ``(n, features)``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float

    def __call__(self, raw: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return a new float32 tensor of the same shape."""
        import torch

        x = torch.from_numpy(np.array(raw)).to(torch.float32)  # a copy: the raw array is a read-only map
        factor, offset = self.terms(x.ndim)
        return x.mul_(factor).add_(offset)

    def terms(self, dimensions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 factor and offset that fit inputs of so many dimensions: first ``x * factor``, then the sum.

        Whoever uses them keeps the two operations apart: a fused multiply-add rounds once, not twice.
        """
        import torch

        view = (1, -1, *[1] * (dimensions - 2))
        factor = torch.tensor([1.0 / (self.scale * s) for s in self.std]).view(view)
        offset = torch.tensor([-m / s for m, s in zip(self.mean, self.std)]).view(view)
        return factor, offset


def token_ids(raw: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return raw token ids ``(n, length)`` as a new int64 tensor."""
    import torch

    return torch.from_numpy(np.array(raw, dtype=np.int64))


def prepared(raw: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return inputs that are prepared already, as float32."""
    import torch

    return torch.from_numpy(np.array(raw, dtype=np.float32))


def limited(examples: Examples, limit: int | None, which: str) -> Examples:
    """Return at most `limit` examples, chosen at random with a fixed key and kept in order."""
    if limit is None or limit >= len(examples):
        return examples
    chosen = np.sort(stream(0, f"limit {which}").permutation(len(examples))[:limit])
    users = None if examples.users is None else examples.users[chosen]
    return Examples(examples.x[chosen], examples.y[chosen], users)


def checked(
    x: Array, y: Array, classes: int, file: Path | str, users: IntArray | None = None, *, empty: bool = False
) -> Examples:
    """Return examples after checking what every later step relies on.

    Raises
    ------
    DataError
        If the numbers of inputs, labels and users differ, a label is out of range, or there are no examples and `empty`
        does not allow that; names `file`.
    """
    if len(x) != len(y) or (users is not None and len(users) != len(y)):
        owners = "" if users is None else f" and {len(users)} users"
        raise DataError(f"{file}: {len(x)} inputs but {len(y)} labels{owners}. The file is damaged.")
    if len(y) or not empty:
        check_labels(y, classes, file)
    return Examples(x, np.asarray(y, dtype=np.int64), users)


def check_labels(y: Array, classes: int, file: Path | str) -> None:
    """Raise :class:`DataError`, naming `file`, unless there are labels and all are in ``[0, classes)``."""
    if len(y) == 0:
        raise DataError(f"{file}: no examples in it.")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        position = int(np.flatnonzero((y < 0) | (y >= classes))[0])
        raise DataError(f"{file}: label {int(y[position])} of example {position} is not in 0..{classes - 1}.")


def stratified(y: IntArray, fraction: float, purpose: str) -> tuple[IntArray, IntArray]:
    """Split ``range(len(y))`` into (train, test) with `fraction` of every class in test, always in the same way.

    Each class gives ``floor(fraction * count + 1/2)`` examples to test, but keeps at least one for training.
    """
    test: list[IntArray] = []
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        count = min(math.floor(fraction * len(members) + 0.5), len(members) - 1)
        test.append(stream(0, purpose, int(label)).permutation(members)[:count])
    held = np.sort(np.concatenate(test)) if test else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(y)), held), held


def require(files: Sequence[Path], name: str, help_text: str) -> None:
    """Raise :class:`DataError` unless all `files` exist; the message lists the missing ones and says what to do."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise DataError(f"{name}: missing {shown}. {help_text}")


def read_lines(file: Path) -> list[str]:
    """Return the lines of a UTF-8 text file; raise :class:`DataError` if it is none or cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not a readable UTF-8 text file ({error}). Copy or unpack it again.") from error


def fetch(dataset: Callable[..., Any], root: Path, name: str) -> None:
    """Download what is missing with a torchvision class (bar, MD5); raise DataError if that fails."""
    try:
        dataset(str(root), train=True, download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{name}: the download into {root.absolute()} failed: {error}") from error
