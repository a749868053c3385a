"""Settings that data sets share, and the last steps from arrays to a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.tasks.base import Examples, IntArray, Task
from fedcross.tasks.reading.cache import Arrays

if TYPE_CHECKING:
    import torch

PARTS = ("train", "test")
NO_AUGMENTATION = {"crop": 0, "crop_padding": "zero", "resized_crop": False, "flip": False, "rotate": 0}


class LimitParams(Settings):
    """Settings of every data set.

    Attributes
    ----------
    limit, limit_test : int or None
        Keep this many training or test examples (a fixed random choice), for quick trials.
    validation : float
        Share of every class of the training examples that no client gets: the server evaluates it beside the test set.
    """

    limit: int | None = Field(default=None, ge=1)
    limit_test: int | None = Field(default=None, ge=1)
    validation: float = Field(default=0.0, ge=0, lt=1)


class FileParams(LimitParams):
    """Settings of data sets that live in files.

    Attributes
    ----------
    root : Path
        Folder with the published files; each task module says which.
    download : bool
        Fetch missing files where the publisher offers them.
    """

    root: Path
    download: bool = False


class OwnParams(LimitParams):
    """Settings of your own data.

    Attributes
    ----------
    root : Path
        Folder of the data.
    test_fraction : float
        Share of every class that is held out if there are no test examples of their own.
    """

    root: Path
    test_fraction: float = Field(default=0.2, ge=0, lt=1)

    def keys(self) -> dict[str, Any]:
        """Return the settings that change the decoded arrays."""
        later = {"root", "limit", "limit_test", "validation", "mean", "std", "standardise", "augment"}
        return self.model_dump(mode="json", exclude=later)


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
            known = f"{len(self.mean)} values but the images have {channels} channels"
            raise ConfigError(f"task.mean has {known}. Give 1 or {channels}.")
        return Normalise(self.mean, self.std, scale)

    def augmentation(self) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None:
        """Return the configured augmentation, None if nothing is asked for."""
        if self.augment is None or self.augment.items() <= NO_AUGMENTATION.items():
            return None  # without importing torch
        from fedcross.tasks.augment import build

        return build(self.augment)


@dataclass(frozen=True)
class Normalise:
    """Raw images ``(n, channels, ...)`` to float32: ``(x / scale - mean) / std`` per channel. Picklable."""

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
        """Return float32 factor and offset for inputs of so many dimensions: first ``x * factor``, then the sum."""
        import torch

        view = (1, -1, *[1] * (dimensions - 2))
        factor = torch.tensor([1.0 / (self.scale * s) for s in self.std]).view(view)
        offset = torch.tensor([-m / s for m, s in zip(self.mean, self.std)]).view(view)
        return factor, offset


def token_ids(raw: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return raw token ids ``(n, length)`` as a new int64 tensor."""
    import torch

    return torch.from_numpy(np.array(raw, dtype=np.int64))


def finished(
    name: str, arrays: Arrays, params: LimitParams, where: Path, labels: Sequence[str] | int = (), **facts: Any
) -> Task:
    """Return the task of the parts in `arrays`, checked and limited; `labels` are the classes' names or their number.

    `arrays` has ``x_PART``, ``y_PART`` and, where there are such, ``u_PART`` (owners) with their ``names``, the names
    of the ``classes``, and the ``words`` of a vocabulary from all training texts. `facts` are fields of the task.
    """
    x = arrays["x_train"]
    if "classes" in arrays:
        labels = tuple(map(str, arrays["classes"]))
    if "words" in arrays:
        facts = {"vocabulary": len(arrays["words"]), "alone": False, **facts}
    if facts.get("vocabulary"):
        facts["prepare"] = token_ids
    elif isinstance(params, ImageParams):
        scale = 255.0 if x.dtype == np.uint8 else 1.0
        facts = {"prepare": params.normaliser(x.shape[1], scale), "augment": params.augmentation(), **facts}
    classes, known = (labels, ()) if isinstance(labels, int) else (len(labels), tuple(labels))
    parts: dict[str, Examples] = {}
    for part, limit in zip(PARTS, (params.limit, params.limit_test)):
        inputs, y = arrays[f"x_{part}"], np.asarray(arrays[f"y_{part}"], dtype=np.int64)
        if len(inputs) != len(y):
            raise DataError(f"{where}: {len(inputs)} inputs but {len(y)} labels. The file is damaged.")
        if len(bad := np.flatnonzero((y < 0) | (y >= classes))):
            raise DataError(f"{where}: label {y[bad[0]]} of example {bad[0]} is not in 0..{classes - 1}.")
        parts[part] = limited(Examples(inputs, y, arrays.get(f"u_{part}")), limit, part)
    facts = {"label_names": known, "user_names": tuple(map(str, arrays.get("names", ()))), **facts}
    return Task(name, parts["train"], parts["test"], classes=classes, shape=tuple(x.shape[1:]), **facts)


def split_parts(parts: Mapping[str, Arrays], fraction: float, purpose: str) -> Arrays:
    """Return the arrays ``x``, ``y`` (and ``u``) of each part as ``x_train`` and so on.

    Without a part ``test``, `fraction` of every class of the part ``train`` becomes it.
    """
    if "test" not in parts:
        whole = parts["train"]
        rows = stratified(whole["y"], fraction, purpose)
        parts = {part: {key: a[chosen] for key, a in whole.items()} for part, chosen in zip(PARTS, rows)}
    return {f"{key}_{part}": array for part, arrays in parts.items() for key, array in arrays.items()}


def limited(examples: Examples, limit: int | None, which: str) -> Examples:
    """Return at most `limit` examples, chosen at random with a fixed key and kept in order."""
    if limit is None or limit >= len(examples):
        return examples
    return examples.take(np.sort(stream(0, f"limit {which}").permutation(len(examples))[:limit]))


def stratified(y: IntArray, fraction: float, purpose: str) -> tuple[IntArray, IntArray]:
    """Split ``range(len(y))`` into (train, test) with `fraction` of every class in test, always in the same way.

    Each class gives ``floor(fraction * count + 1/2)`` examples to test, but keeps at least one for training.
    """
    test = [np.empty(0, np.int64)]
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        count = min(math.floor(fraction * len(members) + 0.5), len(members) - 1)
        test.append(stream(0, purpose, int(label)).permutation(members)[:count])
    held = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(y)), held), held


def published(
    name: str, files: Sequence[Path], params: FileParams, cure: str, download: Callable[[], Any] | None = None
) -> None:
    """Fetch the published `files` if the user asks for it; a DataError with the `cure` says which are missing.

    `download` is None for a data set that its publishers do not offer ready to use.
    """
    if params.download:
        if download is None:
            raise DataError(f"task.download=true: {name} has no ready download. {cure}")
        try:
            download()
        except (RuntimeError, OSError) as error:
            raise DataError(f"{name}: the download into {params.root.absolute()} failed: {error}") from error
    if missing := [str(file) for file in files if not file.is_file()]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise DataError(f"{name}: missing {shown}. {cure}")


def read_lines(file: Path) -> list[str]:
    """Return the lines of a UTF-8 text file; raise :class:`DataError` if it is none or cannot be read."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            return [line.rstrip("\n") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not a readable UTF-8 text file ({error}). Save or copy it again.") from error


def read_npz(path: Path) -> Arrays:
    """Return all arrays of `path`; a DataError if it is damaged or holds objects."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return dict(content)
    except Exception as error:  # a damaged zip raises many kinds
        raise DataError(f"{path}: no .npz of plain arrays ({error}). Make it again with numpy.savez.") from error
