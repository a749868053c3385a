"""bfloat16 is bfloat16 in recurrent layers too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedcross.client import device
from fedcross.client.flat_model import ModuleNet

RECURRENT = (torch.lstm, torch.gru, torch.rnn_relu)


class Seen(TorchFunctionMode):
    """Notes with what a recurrent layer is called, and whether autocast would still turn it into float16."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.calls = self.inside_autocast = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RECURRENT:
            self.calls += 1
            self.inside_autocast += torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
            flat = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
            self.kinds |= {one.dtype for one in flat if isinstance(one, Tensor)}
        return func(*args, **(kwargs or {}))


class Last(nn.Module):
    """A recurrent layer of a user; the emulated GPU has no autocast, so the next layer gets what it would make."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.out = kind(3, 4, 2), nn.Linear(4, 2)
        for name, value in self.rnn.named_parameters():
            if "bias" in name:
                nn.init.constant_(value, 1.0)  # no unit of a layer with ReLU is dead: each has a gradient

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.out(out[-1].float())


KINDS = [lambda *sizes: nn.LSTM(*sizes), nn.GRU, lambda *sizes: nn.RNN(*sizes, nonlinearity="relu")]


def test_on_a_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_recurrent_bfloat16", lambda: True)  # every CPU has it in a GRU
    net = ModuleNet(Last(nn.GRU), torch.device("cpu"), "bfloat16")
    x = torch.randn(5, 6, 3)
    with Seen() as seen:
        found = net.logits(net.params, net.buffers, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, net.module(x).float())
    assert seen.inside_autocast == 1
    assert torch.float32 in seen.kinds


@pytest.mark.parametrize("kind", KINDS, ids=["LSTM", "GRU", "RNN"])
def test_a_cpu_without_a_bfloat16_lstm_takes_float32_in_it(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(device, "has_recurrent_bfloat16", lambda: False)
    net = ModuleNet(Last(kind), torch.device("cpu"), "bfloat16")
    x = torch.randn(5, 6, 3)
    with Seen() as seen:
        found = net.logits(net.params, net.buffers, x)
    found.sum().backward()
    assert (seen.kinds, seen.inside_autocast, seen.calls) == ({torch.float32}, 0, 1)
    last = net.module.rnn(x)[0][-1]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, net.module.out(last).float())
    assert all(bool(p.grad.abs().max() > 0) for p in net.params.values() if p.grad is not None)
