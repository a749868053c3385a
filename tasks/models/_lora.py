"""LoRA adapters through peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.core.extras import install


def with_lora(network: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Put LoRA adapters into `network`, in place, and return it; peft freezes all its other parameters.

    Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. The adapters' names
    contain ``lora_``; the weight beside them is called ``base_layer``.

    Parameters
    ----------
    network : Module
        A network with linear layers.
    settings : mapping
        Arguments of ``peft.LoraConfig``.

    Raises
    ------
    ConfigError
        If peft is not installed, does not know a setting, or finds no layer to adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora: peft is not installed. {install('transformers')}.") from error
    try:
        inject_adapter_in_model(LoraConfig(**settings), network)
    except (TypeError, ValueError, KeyError) as error:
        layers = sorted({name.rpartition(".")[2] for name, m in network.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"model.lora={dict(settings)!r}: peft says: {error} Linear layers here: {', '.join(layers)}."
        ) from error
    return network
