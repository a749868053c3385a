"""bfloat16 inside a network, also in the recurrent layers of a GPU.

torch's autocast turns whatever goes into cuDNN's recurrent layers into float16, also where bfloat16 was asked for
(torch 2.11 to 2.15, ``aten/src/ATen/cudnn/AutocastRNN.cpp``). float16 needs a scaled loss, which nobody does here:
gradients below 6e-8 would vanish, numbers above 65504 become infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

#: What torch's recurrent modules call; one of them is a whole layer stack over all steps.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class _Recurrent(TorchFunctionMode):
    """Takes the recurrent functions out of autocast: tensors become bfloat16 here, and stay as they are there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.autocast(self._device, enabled=False):
            return func(*tree_map(_narrow, args), **tree_map(_narrow, kwargs or {}))


def _narrow(leaf: Any) -> Any:
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def is_recurrent(module: nn.Module) -> bool:
    """Return whether `module` holds a recurrent layer of torch."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


@contextmanager
def bfloat16(device: torch.device, *, recurrent: bool) -> Iterator[None]:
    """Compute in bfloat16 inside the block; `recurrent`: recurrent layers are among what it calls.

    On a CPU that is autocast alone, which keeps to bfloat16 there.
    """
    with torch.autocast(device.type, torch.bfloat16):
        if not (recurrent and device.type == "cuda"):
            yield
            return
        with _Recurrent(device.type):
            yield
