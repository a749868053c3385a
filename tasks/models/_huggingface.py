"""Classifiers of Hugging Face transformers, with random weights, as features and classifier."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, nearest
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import trial_inputs
from fedcross.tasks.models._lora import with_lora
from fedcross.tasks.models.torchvision import halve

#: Token id of padding in every text task.
PADDING = 0


def is_huggingface(target: Any) -> bool:
    """Return whether `target` is a model class of transformers, without importing transformers."""
    return inspect.isclass(target) and any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in target.__mro__
    )


def config_faults(target: Any, given: Mapping[str, Any]) -> list[str]:
    """Return a fault for every setting that the configuration class of `target` does not have."""
    if getattr(target, "config_class", None) is None:
        return [f"model.path: {target.__name__} has no configuration class. Name a class such as BertForSequence..."]
    known = target.config_class().to_dict()
    return [
        f"model.{name}: {target.config_class.__name__} has no such setting. {nearest(name, list(known))}"
        for name in given
        if name not in known
    ]


class Network(nn.Module):
    """A network of transformers as a function from one tensor to its ``logits``.

    Parameters
    ----------
    network : Module
        A ``PreTrainedModel``.
    text : bool
        Whether its inputs are token ids; padding is then masked.

    Attributes
    ----------
    additive : bool
        Whether the mask is an additive one of shape (batch, 1, 1, length). It makes no decision that depends on data,
        so clients can be trained together (``torch.func.vmap``). Other networks get a mask of zeros and ones.
    """

    def __init__(self, network: nn.Module, text: bool) -> None:
        super().__init__()
        self.network = network
        self.text = text
        self.additive = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's logits, (batch, width), of images or of token ids (batch, length)."""
        if not self.text:
            found: Tensor = self.network(pixel_values=x).logits
            return found
        real = x != PADDING
        real = real | (torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1)  # an empty text keeps one position
        mask: Tensor = real.long()
        if self.additive:
            dtype = torch.get_default_dtype()
            mask = torch.where(real[:, None, None, :], 0.0, torch.finfo(dtype).min)
        scores: Tensor = self.network(input_ids=x, attention_mask=mask).logits
        return scores


def wrapped(target: Any, given: dict[str, Any], task: Task, lora: Mapping[str, Any] | None) -> nn.Module:
    """Return a network of class `target` for `task`, split into features and classifier where that is possible.

    The task sets ``num_labels``, ``vocab_size``, ``pad_token_id``, ``image_size`` and ``num_channels`` unless `given`
    does. Attention has no dropout unless `given` asks for it, which is refused: it draws from a global generator.

    Raises
    ------
    ConfigError
        If the configuration does not fit the network, or the task's inputs are not of its kind.
    """
    text = _is_text(target, task)
    config = target.config_class()
    settings: dict[str, Any] = {name: 0.0 for name in config.to_dict() if "dropout" in name and "att" in name}
    settings |= {name: 0.0 for name in ("attn_pdrop",) if hasattr(config, name)}
    facts: dict[str, Any] = {"num_labels": task.classes}
    if text:
        facts |= {"vocab_size": task.vocabulary, "pad_token_id": PADDING}
    else:
        facts |= {"image_size": task.shape[1], "num_channels": task.shape[0]}
    try:
        network = target(target.config_class(**{**settings, **facts, **given, "attn_implementation": "eager"}))
    except Exception as error:  # a configuration's own checks raise several kinds
        raise ConfigError(f"model.path: {target.__name__} cannot be built ({error}). Correct its settings.") from error
    return _split(network, task, text, lora)


def _is_text(target: Any, task: Task) -> bool:
    kind = getattr(target, "main_input_name", "input_ids")
    if kind not in ("input_ids", "pixel_values"):
        raise ConfigError(f"model.path: {target.__name__} takes {kind}. Choose a classifier of text or images.")
    text = kind == "input_ids"
    if text != bool(task.vocabulary) or (not text and len(task.shape) != 3):
        needs = "text (token ids)" if text else "images"
        raise ConfigError(
            f"model.path: {target.__name__} needs {needs}, but task {task.name!r} has inputs of shape {task.shape} and "
            f"a vocabulary of {task.vocabulary}. Choose another task or model."
        )
    return text


def _split(network: nn.Module, task: Task, text: bool, lora: Mapping[str, Any] | None) -> nn.Module:
    """Return `network` in halves, with adapters in the features; whole if its last layer is not the classifier."""
    try:
        halves = halve(network, task.classes, type(network).__name__)
    except ConfigError:
        whole = Network(network if lora is None else with_lora(network, lora), text)
        _choose_mask(whole, task)
        return whole
    features = Network(network if lora is None else with_lora(network, lora), text)
    _choose_mask(features, task)
    halves.features = features
    return halves


def _choose_mask(network: Network, task: Task) -> None:
    """Use the additive mask if the network returns the same values with it on a batch with padding."""
    if not network.text:
        return
    inputs = trial_inputs(task, 3)
    inputs[1, : task.shape[0] // 2] = PADDING
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            expected = network(inputs)
            network.additive = True
            network.additive = torch.equal(network(inputs), expected)
    except Exception:  # noqa: BLE001 - `check_fit` reports what does not work; this only chooses
        network.additive = False
    network.train(was_training)
