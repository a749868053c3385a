"""Checks of a network of the user's own: it fits the task, and a run with it can be repeated."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.base import Task

#: Examples in the trial batch.
ROWS = 2


def trial_inputs(task: Task, rows: int = ROWS) -> Tensor:
    """Return `rows` inputs of `task`'s shape: zeros, or token ids (int64) that go through the vocabulary."""
    if not task.vocabulary:
        return torch.zeros(rows, *task.shape)
    count = rows * task.shape[0]
    return (torch.arange(count) % task.vocabulary).reshape(rows, *task.shape)


def check_fit(network: nn.Module, task: Task, path: str) -> None:
    """Check `network` on a trial batch; leaves it in training mode, with ``embedding`` set if it has halves.

    Raises
    ------
    ConfigError
        If it does not take the task's inputs, does not return one score per class, draws from torch's global
        generator, or has ``features`` and ``classifier`` that are not its two halves.
    """
    inputs, given = trial_inputs(task), f"model.path={path!r}"
    network.eval()
    scores = _tried(network, inputs, given, task)
    if not isinstance(scores, Tensor):
        raise ConfigError(f"{given}: forward returned a {type(scores).__name__}. Return a tensor of class scores.")
    if tuple(scores.shape) != (ROWS, task.classes):
        raise ConfigError(
            f"{given}: forward of {ROWS} examples returned shape {tuple(scores.shape)}, task {task.name!r} needs "
            f"({ROWS}, {task.classes}), one score per class. An argument called classes gets their number."
        )
    _check_halves(network, inputs, scores, given)
    network.train()
    _check_repeatable(network, inputs, given, task)


def _tried(network: nn.Module, inputs: Tensor, given: str, task: Task) -> object:
    try:
        with torch.no_grad():
            return network(inputs)
    except Exception as error:  # a user's forward can raise anything
        kind = "token ids" if task.vocabulary else "inputs"
        raise ConfigError(
            f"{given}: forward of {kind} of shape {tuple(inputs.shape)} and {inputs.dtype} raised "
            f"{type(error).__name__}: {error}. Make it fit task {task.name!r}."
        ) from error


def _check_halves(network: nn.Module, inputs: Tensor, scores: Tensor, given: str) -> None:
    """Check that ``classifier(features(x))`` is the network, and set ``embedding``, the width between them."""
    children = dict(network.named_children())
    if not {"features", "classifier"} <= children.keys():
        return
    with torch.no_grad():
        embedded = children["features"](inputs)
        fits = isinstance(embedded, Tensor) and embedded.dim() == 2
        if not fits or not torch.allclose(children["classifier"](embedded), scores, atol=1e-5):
            raise ConfigError(
                f"{given}: classifier(features(x)) is not forward(x), with features(x) of shape (batch, embedding). "
                "Make them the two halves, or give the children other names."
            )
    width = int(embedded.shape[1])
    if getattr(network, "embedding", width) != width:
        raise ConfigError(f"{given}: embedding={network.embedding!r}, but features(x) has {width} columns.")
    if not hasattr(network, "embedding"):
        network.embedding = width  # type: ignore[assignment]


def _check_repeatable(network: nn.Module, inputs: Tensor, given: str, task: Task) -> None:
    """Raise a ConfigError if training draws from torch's global generator: no two engines would agree."""
    before = torch.default_generator.get_state()
    _tried(copy.deepcopy(network), inputs, given, task)
    if not torch.equal(before, torch.default_generator.get_state()):
        raise ConfigError(
            f"{given}: forward draws random numbers from torch's global generator, so no run could be repeated. Use "
            "nn.Dropout as a layer (fedcross replaces it by one that is repeatable), not functional.dropout or "
            "nn.Dropout2d."
        )
