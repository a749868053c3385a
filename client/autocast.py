"""bfloat16 inside a network, also in the recurrent layers of a GPU; float32 in those of a CPU that has no others.

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
    """Takes the recurrent functions out of autocast: tensors become of `dtype` here, and stay as they are there."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.autocast(self._device, enabled=False):
            return func(*tree_map(self._turned, args), **tree_map(self._turned, kwargs or {}))

    def _turned(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def is_recurrent(module: nn.Module) -> bool:
    """Return whether `module` holds a recurrent layer of torch."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


@contextmanager
def bfloat16(device: torch.device, *, recurrent: bool) -> Iterator[None]:
    """Compute in bfloat16 inside the block; `recurrent`: recurrent layers are among what it calls.

    On a CPU that is autocast alone, which keeps to bfloat16 there. A CPU without AVX-512 has no LSTM in bfloat16:
    recurrent layers compute in float32 on it.
    """
    with torch.autocast(device.type, torch.bfloat16):
        if not recurrent or (device.type == "cpu" and has_bfloat16()):
            yield
            return
        with _Recurrent(device.type, torch.float32 if device.type == "cpu" else torch.bfloat16):
            yield


def has_bfloat16() -> bool:
    """Return whether this CPU's recurrent layers can be in bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
