"""A convolution with a max-pool behind it: values are torch's to the bit, gradients are torch's up to rounding."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

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


def test_inputs_in_another_layout_and_order_of_the_gradient(ways_back):
    ours, theirs = pair(3, 5, 3, 1)
    x = pictures(4, 3, 8, 8)
    plain = x.detach().contiguous().requires_grad_()
    back = torch.randn(4, 4, 4, 5).permute(0, 3, 1, 2)
    for mine, reference in zip(gradients(ours, plain, back), gradients(theirs, x, back), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5)
    assert len(ways_back) == 1


@pytest.mark.slow
def test_the_compiled_pool_gives_the_same(monkeypatch, ways_back):
    ours, _ = pair(3, 6, 5)
    x = pictures(4, 3, 12, 12)
    back = torch.randn(4, 6, 4, 4)
    first = ours(x), *gradients(ours, x, back)
    monkeypatch.setattr(pooling, "TRIAL", 0)
    second = ours(x), *gradients(ours, x, back)
    assert all(map(torch.equal, first, second))
    assert len(ways_back) == 2


def test_the_first_layer_needs_no_gradient_of_its_input(monkeypatch):
    from fedcross.tasks.models import pooling_loop

    original = pooling_loop.patches

    def patches(*given):
        assert given[-1] is False, "found a gradient that nobody wants"
        original(*given)

    monkeypatch.setattr(pooling_loop, "patches", patches)
    ours, theirs = pair(3, 6, 5)
    x = pictures(4, 3, 12, 12).detach()
    for layers in (ours, theirs):
        layers(x).square().sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad, rtol=1e-4, atol=1e-4)


def test_nan_comes_through():
    ours, _ = pair(1, 2, 3)
    x = pictures(1, 1, 6, 6)
    back = torch.full((1, 2, 2, 2), torch.nan)
    assert all(found.isnan().any() for found in gradients(ours[:2], x, back))


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


def test_many_models_at_once_go_through_torch(ways_back):
    ours, theirs = pair(3, 4, 3)
    x = torch.randn(5, 2, 3, 8, 8)

    def loss(layers):
        return lambda params, x: functional_call(layers, params, (x,)).square().sum()

    params = {name: value.detach() for name, value in ours.named_parameters()}
    found, reference = (vmap(grad(loss(layers)), in_dims=(None, 0))(params, x) for layers in (ours, theirs))
    assert all(torch.equal(found[name], reference[name]) for name in params)
    assert ways_back == []


def test_functional_calls_go_our_way(ways_back):
    ours, theirs = pair(3, 4, 3)
    x = pictures(2, 3, 8, 8)
    params = {name: (value + 1).detach().requires_grad_() for name, value in ours.named_parameters()}
    for layers in (ours, theirs):
        functional_call(layers, params, (x,)).square().sum().backward()
    assert len(ways_back) == 1
    assert all(value.grad is not None for value in params.values())


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


@pytest.mark.parametrize("what", ["input", "weight"])
def test_what_is_changed_between_convolution_and_pool_is_an_error_as_in_torch(what):
    (ours, *_), _ = pair(3, 4, 3)
    x = pictures(2, 3, 8, 8).detach()
    y = ours(x)
    with torch.no_grad():
        (x if what == "input" else ours.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        MaxPool2()(y).sum().backward()


def test_a_weight_that_is_new_at_each_look_is_read_once(ways_back):
    class Doubled(nn.Module):
        looks = 0

        def forward(self, weight):
            self.looks += 1
            return weight * 2**self.looks

    ours, theirs = pair(3, 4, 3)
    with torch.no_grad():
        theirs[0].weight.mul_(2)
    parametrized = Doubled()
    nn.utils.parametrize.register_parametrization(ours[0], "weight", parametrized)
    parametrized.looks = 0
    x = pictures(2, 3, 8, 8)
    found, reference = (torch.autograd.grad(layers(x).square().sum(), x)[0] for layers in (ours, theirs))
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)
    assert len(ways_back) == 1


@pytest.mark.parametrize("name", ["stride", "dilation", "padding_mode", "bias", "ceil_mode", "pool stride"])
def test_other_settings_are_torchs(ways_back, name):
    changed = {
        "stride": ("stride", (2, 2)), "dilation": ("dilation", (2, 2)), "padding_mode": ("padding_mode", "circular"),
        "bias": ("bias", None), "ceil_mode": ("ceil_mode", True), "pool stride": ("stride", 1),
    }[name]  # fmt: skip
    found = []
    for layers in pair(3, 4, 3, 1):
        setattr(layers[1 if name in ("ceil_mode", "pool stride") else 0], *changed)
        x = pictures(2, 3, 9, 9)
        found.append(gradients(layers, x, torch.ones_like(layers(x))))
    assert all(map(torch.equal, *found))
    assert ways_back == []


def test_another_default_dtype_changes_nothing():
    ours, _ = pair(3, 4, 3)
    x, back = pictures(2, 3, 8, 8), torch.ones(2, 4, 3, 3)
    before = gradients(ours, x, back)
    torch.set_default_dtype(torch.float64)
    try:
        after = gradients(ours, x, back)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, before, after))


def test_the_state_has_torchs_names_and_first_weights():
    torch.manual_seed(5)
    ours = Convolution(3, 4, 5, 2)
    torch.manual_seed(5)
    theirs = nn.Conv2d(3, 4, 5, padding=2)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(ours(x), functional.conv2d(x, theirs.weight, theirs.bias, padding=2))
