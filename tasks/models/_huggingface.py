"""Classifiers of Hugging Face transformers, with random weights, as features and classifier."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, nearest, needed
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import trial_inputs
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
    known = list(target.config_class().to_dict())
    kind = target.config_class.__name__
    return [f"model.{name}: {kind} has no such setting. {nearest(name, known)}" for name in given if name not in known]


class Network(nn.Module):
    """A ``PreTrainedModel`` as a function from one tensor to its ``logits``; in `text`, padding is masked.

    An `additive` mask of shape (batch, 1, 1, length) makes no decision that depends on data, so clients can be trained
    together (``torch.func.vmap``). Other networks get a mask of zeros and ones.
    """

    def __init__(self, network: nn.Module, text: bool) -> None:
        super().__init__()
        self.network, self.text, self.additive = network, text, False

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's logits, (batch, width), of images or of token ids (batch, length)."""
        if not self.text:
            found: Tensor = self.network(pixel_values=x).logits
            return found
        real = x != PADDING
        real = real | (torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1)  # an empty text keeps one position
        mask: Tensor = real.long()
        if self.additive:
            mask = torch.where(real[:, None, None, :], 0.0, torch.finfo(torch.get_default_dtype()).min)
        scores: Tensor = self.network(input_ids=x, attention_mask=mask).logits
        return scores


def wrapped(target: Any, given: dict[str, Any], task: Task, lora: Mapping[str, Any] | None) -> nn.Module:
    """Return a network of class `target` for `task`, in halves (adapters in the features) where that is possible.

    The task sets ``num_labels``, ``vocab_size``, ``pad_token_id``, ``image_size`` and ``num_channels`` unless `given`
    does. Attention has no dropout: it draws from a global generator.
    """
    kind = getattr(target, "main_input_name", "input_ids")
    text = kind == "input_ids"
    if kind not in ("input_ids", "pixel_values") or text != bool(task.vocabulary) or not (text or len(task.shape) == 3):
        needs = "text (token ids)" if text else "images" if kind == "pixel_values" else kind
        given_is = f"task {task.name!r} has inputs of shape {task.shape} and a vocabulary of {task.vocabulary}"
        raise ConfigError(f"model.path: {target.__name__} needs {needs}, but {given_is}. Choose another task or model.")
    config = target.config_class()
    settings: dict[str, Any] = {name: 0.0 for name in config.to_dict() if "dropout" in name and "att" in name}
    settings |= {"attn_pdrop": 0.0} if hasattr(config, "attn_pdrop") else {}
    settings |= {"num_labels": task.classes, "attn_implementation": "eager"}
    if text:
        settings |= {"vocab_size": task.vocabulary, "pad_token_id": PADDING}
    else:
        settings |= {"image_size": task.shape[1], "num_channels": task.shape[0]}
    try:
        network = target(target.config_class(**{**settings, **given}))
    except Exception as error:  # a configuration's own checks raise several kinds
        raise ConfigError(f"model.path: {target.__name__} cannot be built ({error}). Correct its settings.") from error
    halves = None
    with suppress(ConfigError):
        halves = halve(network, task.classes, type(network).__name__)
    found = Network(network if lora is None else with_lora(network, lora), text)
    _choose_mask(found, task)
    if halves is None:
        return found
    halves.features = found
    return halves


def with_lora(network: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Put LoRA adapters into `network`, in place, and return it; peft freezes all its other parameters.

    Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. `settings` are
    arguments of ``peft.LoraConfig``. The adapters' names contain ``lora_``; the weight beside them is ``base_layer``.
    """
    peft = needed("peft", "transformers", "model.lora")
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(**settings), network)
    except (TypeError, ValueError, KeyError) as error:
        layers = sorted({name.rpartition(".")[2] for name, m in network.named_modules() if isinstance(m, nn.Linear)})
        said = f"peft says: {error} Linear layers here: {', '.join(layers)}."
        raise ConfigError(f"model.lora={dict(settings)!r}: {said}") from error
    return network


def _choose_mask(network: Network, task: Task) -> None:
    """Use the additive mask if the network returns the same values with it on a batch with padding."""
    if not network.text:
        return
    inputs = trial_inputs(task, 3)
    inputs[1, : task.shape[0] // 2] = PADDING
    network.eval()
    try:
        with torch.no_grad():
            expected = network(inputs)
            network.additive = True
            network.additive = torch.equal(network(inputs), expected)
    except Exception:  # noqa: BLE001 - `check_fit` reports what does not work; this only chooses
        network.additive = False
    network.train()
