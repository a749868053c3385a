"""Counter-based dropout: its masks, rate, scale, streams and state."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcross.tasks.models.dropout import Dropout, dropout_names, dropout_states, seed_dropout


def layer(p: float, state: int = 7) -> Dropout:
    drop = Dropout(p)
    drop.state.fill_(state)
    return drop


def test_mask_is_splitmix64() -> None:
    """SplitMix64's published outputs for seed 1234567; dropped where output / 2^64 < p."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    for p in (0.2, 0.3, 0.5, 0.6):
        expected = [0.0 if u / 2**64 < p else 1.0 for u in outputs]
        assert (layer(p, 1234567)(torch.ones(1, 5)) > 0).float().tolist() == [expected]


@settings(max_examples=20, deadline=None)
@given(p=st.floats(0.0, 0.95), state=st.integers(-(2**63), 2**63 - 1))
def test_rate_and_scale(p: float, state: int) -> None:
    """Kept values are x/(1-p); the kept share of 20,000 lies within 5 standard deviations of 1-p."""
    out = layer(p, state)(torch.full((100, 200), 3.0))
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3.0 / (1 - p)))
    assert abs(kept.double().mean().item() - (1 - p)) <= 5 * (p * (1 - p) / 20_000) ** 0.5


def test_same_state_same_masks_whatever_the_global_generator() -> None:
    x = torch.ones(4, 50)
    a, b = layer(0.5), layer(0.5)
    first = a(x)
    torch.rand(3)
    assert torch.equal(first, b(x))
    assert not torch.equal(first, a(x))  # the state has moved on
    b(x)
    assert torch.equal(a.state, b.state)


def test_layers_have_their_own_streams_and_states_are_not_persistent() -> None:
    model = nn.Sequential(nn.Linear(50, 50), Dropout(0.5), nn.Sequential(Dropout(0.5)))
    assert dropout_names(model) == ["1.state", "2.0.state"]
    assert not any("state" in name for name in model.state_dict())
    seed_dropout(model, 11)
    states = dropout_states(model, 11)
    assert states["1.state"] != states["2.0.state"]
    assert all(torch.equal(model.get_buffer(name), state) for name, state in states.items())
    x = torch.ones(1, 50)
    assert not torch.equal(model[1](x), model[2](x))
    assert dropout_states(model, 12)["1.state"] != states["1.state"]
    assert dropout_names(Dropout(0.5)) == ["state"]
