"""Checks of a network of the user's own: it fits the task, and a run with it can be repeated."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.base import Task


def trial_inputs(task: Task, rows: int = 2) -> Tensor:
    """Return `rows` inputs of `task`'s shape: zeros, or token ids (int64) that go through the vocabulary."""
    if not task.vocabulary:
        return torch.zeros(rows, *task.shape)
    return (torch.arange(rows * task.shape[0]) % task.vocabulary).reshape(rows, *task.shape)


def check_fit(network: nn.Module, task: Task, given: str) -> None:
    """Check `network` on a trial batch; leaves it in training mode, with ``embedding`` set if it has halves.

    Raises
    ------
    ConfigError
        Begun by `given`: it does not take the task's inputs, does not return one score per class, draws from torch's
        global generator, or has ``features`` and ``classifier`` that are not its two halves.
    """
    inputs, children = trial_inputs(task), dict(network.named_children())
    halves = {"features", "classifier"} <= children.keys()
    before = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            scores = network.eval()(inputs)
            embedded = children["features"](inputs) if halves else None
            composed = children["classifier"](embedded) if halves else scores
            copy.deepcopy(network).train()(inputs)
    except Exception as error:  # a user's forward can raise anything
        of = f"inputs of shape {tuple(inputs.shape)} and {inputs.dtype} raised {type(error).__name__}"
        raise ConfigError(f"{given}: forward of {of}: {error}. Make it fit task {task.name!r}.") from error
    if not isinstance(scores, Tensor) or tuple(scores.shape) != (len(inputs), task.classes):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        needed = f"task {task.name!r} needs a tensor ({len(inputs)}, {task.classes}), one score per class"
        cure = "An argument called classes gets their number."
        raise ConfigError(f"{given}: forward of {len(inputs)} examples returned {found}, {needed}. {cure}")
    if not torch.equal(before, torch.default_generator.get_state()):
        cure = "Use nn.Dropout as a layer, which fedcross replaces by a repeatable one, no other dropout."
        raise ConfigError(f"{given}: forward draws from torch's global generator, no run could be repeated. {cure}")
    if embedded is not None:
        if embedded.dim() != 2 or not torch.allclose(composed, scores, atol=1e-5):
            halves_are = "classifier(features(x)) is not forward(x), with features(x) of shape (batch, embedding)"
            raise ConfigError(f"{given}: {halves_are}. Make them the two halves, or give the children other names.")
        width = int(embedded.shape[1])
        if getattr(network, "embedding", width) != width:
            raise ConfigError(f"{given}: embedding={network.embedding!r}, but features(x) has {width} columns.")
        network.embedding = width  # type: ignore[assignment]
    network.train()
