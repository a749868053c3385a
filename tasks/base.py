"""The data of a task: training examples, test examples, and the conversion of raw values to tensors.

A task module ``tasks/NAME.py`` has ``Params`` (settings) and ``load(params) -> Task``. A model module
``tasks/models/NAME.py`` has ``Params`` and ``build(params, task, width) -> torch.nn.Module``; the module has two
children, ``features`` (input to embedding, shape ``(batch, embedding)``) and ``classifier`` (embedding to logits), and
an attribute ``embedding: int``. ``width(64)`` says how many of 64 hidden channels it has (:class:`tasks.models.width.
Hidden`); a model without the argument has one width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Labelled examples in their compact raw form.

    ``x`` (n, ...) are often a read-only memory map of uint8 or float32 images ``(n, channels, height, width)``, or of
    int token ids ``(n, length)``; ``y`` int64 (n,) labels in ``[0, classes)``; ``users`` int64 (n,) the natural owners.
    """

    x: npt.NDArray[np.generic]
    y: IntArray
    users: IntArray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: IntArray) -> Examples:
        """Return the examples at `rows`."""
        return Examples(self.x[rows], self.y[rows], None if self.users is None else self.users[rows])


@dataclass(frozen=True)
class Task:
    """A loaded data set.

    Attributes
    ----------
    name, classes : str, int
        The configuration's name; the number of labels.
    train, test, validation : Examples
        Examples to partition over clients; the central test set; training examples that no client gets, or None.
    shape : tuple of int
        Shape of one prepared input: ``(channels, height, width)`` or ``(length,)``.
    prepare : callable
        Raw inputs ``(n, ...)`` to a normalised float32 tensor ``(n, *shape)`` (or int64 token ids).
    augment : callable or None
        ``(batch, generator) -> batch`` on prepared tensors, training only.
    vocabulary : int
        Number of token ids for text, else 0.
    label_names, feature_names, user_names : sequence of str
        Names of the classes, of a table's columns, and of the natural users (``Examples.users``); may be empty.
    alone : bool
        Whether a device that has only its own examples prepares them as all others do.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    shape: tuple[int, ...]
    prepare: Callable[[npt.NDArray[np.generic]], torch.Tensor]
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None
    vocabulary: int = 0
    label_names: Sequence[str] = field(default=())
    feature_names: Sequence[str] = field(default=())
    user_names: Sequence[str] = field(default=())
    alone: bool = True
    validation: Examples | None = None


@dataclass(frozen=True)
class Partition:
    """Assignment of a task's examples to clients.

    Attributes
    ----------
    train : sequence of int64 arrays
        Indices into ``task.train`` for each client; client ids are 0..len-1.
    test : sequence of int64 arrays or None
        Indices into ``task.test`` for each client, where the partition defines them.
    transform : callable or None
        ``(client, raw inputs) -> raw inputs``, for partitions that change the inputs (permuted pixels).
    test_transform : callable or None
        ``(indices into task.test, raw inputs at them) -> raw inputs``: what the central test set must go through
        where `transform` is not None.
    names : sequence of str
        Name of each client, such as its site; empty if clients have numbers only.
    own : bool
        Whether all of this machine's data belongs to whichever client runs here (a real edge device).
    """

    train: Sequence[IntArray]
    test: Sequence[IntArray] | None = None
    transform: Callable[[int, npt.NDArray[np.generic]], npt.NDArray[np.generic]] | None = None
    test_transform: Callable[[IntArray, npt.NDArray[np.generic]], npt.NDArray[np.generic]] | None = None
    own: bool = False
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.train)
