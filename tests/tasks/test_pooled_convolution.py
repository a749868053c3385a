"""A convolution with a max-pool behind it: values are torch's to the bit, gradients are torch's up to rounding."""

import pytest
import torch
from torch import nn

from fedcross.tasks.models import pooling
from fedcross.tasks.models.pooling import Convolution, MaxPool2


def pictures(*shape, seed=1):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def gradients(layers, x, back):
    return torch.autograd.grad(layers(x), [x, *layers.parameters()], back)


def pair(channels_in, channels_out, kernel, padding=0):
    torch.manual_seed(3)
    ours = nn.Sequential(Convolution(channels_in, channels_out, kernel, padding), MaxPool2(), nn.ReLU())
    theirs = nn.Sequential(nn.Conv2d(channels_in, channels_out, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture
def ways_back(monkeypatch):
    """Count the calls of our way back."""
    calls, original = [], pooling._back
    monkeypatch.setattr(pooling, "_back", lambda *given: calls.append(given[1].shape) or original(*given))
    return calls


def test_by_hand(ways_back):
    layers = nn.Sequential(Convolution(1, 1, 2), MaxPool2())
    with torch.no_grad():
        layers[0].weight.copy_(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
        layers[0].bias.fill_(0.5)
    x = torch.tensor([[[[1.0, 0.0, 2.0], [0.0, 5.0, 0.0], [3.0, 0.0, 1.0]]]]).requires_grad_()
    # The four results: 1 + 20, 4 + 15, 10 + 9, 5 + 4, each + .5; the largest is the one at the upper left.
    out = layers(x)
    assert out.tolist() == [[[[21.5]]]]
    out.backward(torch.tensor([[[[10.0]]]]))
    assert layers[0].weight.grad.tolist() == [[[[10.0, 0.0], [0.0, 50.0]]]]
    assert layers[0].bias.grad.tolist() == [10.0]
    assert x.grad.tolist() == [[[[10.0, 20.0, 0.0], [30.0, 40.0, 0.0], [0.0, 0.0, 0.0]]]]
    assert ways_back == [(1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("n", "channels_in", "channels_out", "height", "width", "kernel", "padding"),
    [
        (50, 3, 6, 32, 32, 5, 0),
        (50, 6, 16, 14, 14, 5, 0),
        (3, 1, 4, 8, 10, 3, 1),
        (2, 32, 9, 15, 13, 5, 2),  # the pool leaves a row and a column out
        (2, 3, 3, 6, 6, 1, 0),
    ],
)
def test_gradients_are_torchs(ways_back, n, channels_in, channels_out, height, width, kernel, padding):
    ours, theirs = pair(channels_in, channels_out, kernel, padding)
    x = pictures(n, channels_in, height, width)
    assert torch.equal(ours(x), theirs(x))
    back = torch.randn(theirs(x).shape)
    found = gradients(ours, x, back)
    for mine, reference in zip(found, gradients(theirs.double(), x.double(), back.double()), strict=True):
        assert mine.shape == reference.shape
        assert (mine - reference).abs().max() <= 3e-6 * reference.abs().max()
    assert len(ways_back) == 1


def test_second_derivatives_are_torchs():
    ours, theirs = pair(2, 3, 3)
    found = []
    for layers in (ours, theirs):
        x = pictures(2, 2, 6, 6)
        (slope,) = torch.autograd.grad(layers(x).square().sum(), layers[0].weight, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [layers[0].weight, x]))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["evaluation", "no_grad", "float64", "bfloat16", "alone", "empty"])
def test_where_it_does_not_fit_torch_does_it(ways_back, case):
    ours, theirs = pair(3, 4, 3)
    x = pictures(0 if case == "empty" else 2, 3, 8, 8)
    if case == "evaluation":
        ours.eval()
    if case == "float64":
        ours.double(), theirs.double()
        x = x.detach().double().requires_grad_()
    if case == "alone":
        ours, theirs = ours[:1], theirs[:1]
    with torch.set_grad_enabled(case != "no_grad"), torch.autocast("cpu", enabled=case == "bfloat16"):
        out, reference = ours(x), theirs(x)
    assert torch.equal(out, reference)
    if case == "no_grad":
        assert not out.requires_grad
    else:
        out.float().sum().backward()
        reference.float().sum().backward()
        assert torch.equal(ours[0].weight.grad, theirs[0].weight.grad)
    assert ways_back == []


@pytest.mark.parametrize("how", ["changed in place", "hook", "retained"])
def test_an_output_that_is_looked_at_or_changed_before_the_pool_has_its_own_gradient(ways_back, how):
    (ours, *_), (theirs, *_) = pair(3, 4, 3)
    found = []
    for layer in (ours, theirs):
        y, seen = layer(pictures(2, 3, 8, 8)), []
        if how == "changed in place":
            y.mul_(3)
        elif how == "hook":
            y.register_hook(seen.append)
        else:
            y.retain_grad()
        MaxPool2()(y).square().sum().backward()
        found.append([layer.weight.grad, *seen, *([y.grad] if how == "retained" else [])])
    assert all(map(torch.equal, *found))
    assert len(found[0]) == (1 if how == "changed in place" else 2)
    assert ways_back == []
