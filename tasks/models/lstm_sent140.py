"""LEAF's stacked LSTM for Sent140 (sentiment of tweets)."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._recurrent import LastStepLSTM
from fedcross.tasks.models._split import Split, tokens


class Params(Settings):
    """Settings of the LSTM.

    Attributes
    ----------
    embedding : int
        Width of the learned word vectors; unused when `vectors` is given.
    hidden : int
        Width of each of the two LSTM layers.
    vectors : str
        Optional ``.npy`` file, float32 of shape (vocabulary, width), of fixed word vectors (GloVe). They are no
        weights: neither trained nor sent.
    """

    embedding: int = Field(default=100, ge=1)
    hidden: int = Field(default=100, ge=1)
    vectors: str = ""


class FixedEmbedding(nn.Module):
    """Look word vectors up that are never trained.

    Parameters
    ----------
    vectors : Tensor of float32, shape (vocabulary, width)
        Kept outside the ``state_dict``.
    """

    vectors: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, length, width)`` of token ids ``(batch, length)``."""
        return F.embedding(x, self.vectors)


def build(params: Params, task: Task) -> Split:
    """Return word vectors, two LSTM layers of 100, the last step, a linear layer of 128, classes.

    There is no public code of FedCross for Sent140; this is LEAF's model, including the linear layer of 128 without an
    activation after it. LEAF's released model learns its vectors and ignores the GloVe array; `vectors` offers the
    fixed ones.

    Weights for V words and 2 classes: 100 V + 2*(4*100*200+800) + 100*128+128 + 128*2+2 = 100 V + 174,786.
    """
    vocabulary = tokens(task, "lstm_sent140")
    embedding: nn.Module
    if params.vectors:
        fixed = _load(Path(params.vectors), vocabulary)
        embedding, width = FixedEmbedding(fixed), fixed.shape[1]
    else:
        embedding, width = nn.Embedding(vocabulary, params.embedding), params.embedding
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=embedding, lstm=LastStepLSTM(width, params.hidden, 2), fc1=nn.Linear(params.hidden, 128)
    )
    return Split(nn.Sequential(parts), nn.Linear(128, task.classes))


def _load(path: Path, vocabulary: int) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.vectors={str(path)!r}: cannot be read ({error}). Give a .npy file.") from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or len(array) != vocabulary:
        raise ConfigError(
            f"model.vectors={str(path)!r}: holds {getattr(array, 'shape', 'several arrays')}, but the vocabulary has "
            f"{vocabulary} words. Give one row per word, (vocabulary, width)."
        )
    return torch.from_numpy(array.astype(np.float32))
