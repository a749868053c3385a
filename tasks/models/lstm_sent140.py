"""LEAF's stacked LSTM for Sent140 (sentiment of tweets)."""

from __future__ import annotations

from collections import OrderedDict

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
from fedcross.tasks.models.width import Hidden


class Params(Settings):
    """Settings of the LSTM.

    Attributes
    ----------
    embedding, hidden : int
        Width of the learned word vectors, and of each of the two LSTM layers.
    vectors : str
        Optional ``.npy`` file, float32 of shape (vocabulary, width), of word vectors that are neither trained nor sent.
    """

    embedding: int = Field(default=100, ge=1)
    hidden: int = Field(default=100, ge=1)
    vectors: str = ""


class FixedEmbedding(nn.Module):
    """Look up word vectors, float32 (vocabulary, width), that are never trained and outside the ``state_dict``."""

    vectors: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, length, width)`` of token ids ``(batch, length)``."""
        return F.embedding(x, self.vectors)


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return word vectors, two LSTM layers of 100, the last step, a linear layer of 128, classes.

    There is no public code of FedCross for Sent140; this is LEAF's model, including the linear layer of 128 without an
    activation after it. LEAF's released model learns its vectors; `vectors` offers fixed ones.

    Weights for V words and 2 classes: 100 V + 2*(4*100*200+800) + 100*128+128 + 128*2+2 = 100 V + 174,786.
    """
    words = tokens(task, "lstm_sent140")
    inputs = width(params.embedding) if not params.vectors else 0
    embedding: nn.Module = nn.Embedding(words, inputs) if inputs else FixedEmbedding(_load(params.vectors, words))
    if isinstance(embedding, FixedEmbedding):
        inputs = embedding.vectors.shape[1]
    state, last = width(params.hidden), width(128)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=embedding, lstm=LastStepLSTM(inputs, state, 2), fc1=nn.Linear(state, last)
    )
    return Split(nn.Sequential(parts), nn.Linear(last, task.classes))


def _load(path: str, vocabulary: int) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
        if array.ndim != 2 or len(array) != vocabulary:
            raise ValueError(f"shape {array.shape}, but the vocabulary has {vocabulary} words")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.vectors={path!r}: {error}. Give a .npy file with one row per word.") from error
    return torch.from_numpy(array.astype(np.float32))
