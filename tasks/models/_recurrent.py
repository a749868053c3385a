"""An LSTM that also runs for many clients at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LastStepLSTM(nn.LSTM):
    """torch's LSTM, batch first, returning the last step of the top layer.

    ``torch.func.vmap`` has no batching rule for the fused kernels (oneDNN, cuDNN). Inside a ``torch.func`` transform
    the same equations therefore run as plain tensor operations, with equal results to rounding.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__(inputs, hidden, layers, batch_first=True)

    def flatten_parameters(self) -> None:
        """Do nothing: cuDNN would move the weights into memory of its own, away from the trainer's flat row."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the last hidden state, ``(batch, hidden)``, of `x`, ``(batch, length, inputs)``."""
        if torch._C._functorch.maybe_current_level() is None:
            return super().forward(x)[0][:, -1]
        for layer in range(self.num_layers):
            x = self._layer(x, layer)
        return x[:, -1]

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        """Return all hidden states, ``(batch, length, hidden)``, of one layer."""
        input_weight, state_weight = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
        bias = getattr(self, f"bias_ih_l{layer}") + getattr(self, f"bias_hh_l{layer}")
        steps = F.linear(x, input_weight, bias).unbind(1)
        h = c = torch.zeros_like(steps[0][:, : self.hidden_size])
        states = []
        for step in steps:
            i, f, g, o = (step + F.linear(h, state_weight)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, dim=1)
