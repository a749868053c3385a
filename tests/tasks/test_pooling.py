"""The compiled 2x2 max-pool is torch's, to the bit: values, gradients, second derivatives, NaN and ties."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedcross.tasks.models import pooling
from fedcross.tasks.models.pooling import MaxPool2


@pytest.fixture
def compiled(monkeypatch):
    """No trial: every call that suits goes through the loop; returns how many did."""
    calls = []
    monkeypatch.setattr(pooling, "TRIAL", 0)
    original = pooling._Pool.apply
    monkeypatch.setattr(pooling._Pool, "apply", lambda x: calls.append(x.shape) or original(x))
    return calls


def images(*shape, dtype=torch.float32, seed=1):
    x = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.slow
def test_by_hand(compiled):
    x = torch.tensor([[1.0, 2.0, 7.0, 7.0], [4.0, 3.0, 7.0, -1.0]]).reshape(1, 1, 2, 4).requires_grad_()
    out = MaxPool2()(x)
    out.backward(torch.tensor([[[[10.0, 20.0]]]]))
    assert out.tolist() == [[[[4.0, 7.0]]]]
    assert x.grad.tolist() == [[[[0.0, 0.0, 20.0, 0.0], [10.0, 0.0, 0.0, 0.0]]]]  # of equal values the first
    assert compiled == [(1, 1, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(50, 6, 28, 28), (3, 64, 8, 10), (1, 1, 2, 2), (2, 3, 4, 6)])
def test_values_and_gradients_are_torchs(compiled, shape, dtype):
    x = images(*shape, dtype=dtype)
    with torch.no_grad():
        x.mul_(4).round_()  # many ties
    y = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    ours, theirs = MaxPool2()(x), nn.MaxPool2d(2)(y)
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    weight = torch.randn(theirs.shape, dtype=dtype)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert len(compiled) == 1


@pytest.mark.parametrize("least", [0, 1, 2], ids=["NaN", "infinite", "finite"])
def test_nan_and_infinity_win_and_lose_as_in_torch(compiled, least):
    special = torch.tensor([float("nan"), float("inf"), 3.0, 0.0, -0.0, 1.0])
    draw = torch.randint(least, 6, (40, 5, 6, 6), generator=torch.Generator().manual_seed(2))
    x = special[draw].contiguous(memory_format=torch.channels_last).requires_grad_()
    y = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    ours, theirs = MaxPool2()(x), nn.MaxPool2d(2)(y)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    ours.nan_to_num().sum().backward()
    theirs.nan_to_num().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert len(compiled) == (least == 2)


def test_second_derivatives(compiled):
    x = images(2, 2, 4, 4, dtype=torch.float64)
    pool = MaxPool2()
    assert torch.autograd.gradcheck(pool, x)
    assert torch.autograd.gradgradcheck(pool, x)
    assert compiled


@pytest.mark.parametrize(
    "x",
    [
        images(2, 3, 5, 4),
        images(2, 3, 4, 7),
        images(2, 3, 4, 4, dtype=torch.bfloat16),
        torch.randn(2, 3, 4, 4).contiguous(),
        torch.randn(3, 4, 4),
        torch.empty(0, 3, 4, 4),
    ],
    ids=["odd height", "odd width", "bfloat16", "channels first", "one picture", "empty"],
)
def test_what_does_not_suit_goes_to_torch(compiled, x):
    assert torch.equal(MaxPool2()(x), nn.MaxPool2d(2)(x))
    assert compiled == []


def test_functional_transforms_go_to_torch(compiled):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), MaxPool2()).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 1, 6, 6)

    def loss(parameters, batch):
        return functional_call(net, parameters, (batch,)).square().sum()

    parameters = {name: p.detach() for name, p in net.named_parameters()}
    vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert compiled == []


def test_a_process_that_pools_little_compiles_nothing(monkeypatch):
    monkeypatch.setattr(pooling, "_pooled", 0)
    monkeypatch.setattr(pooling, "TRIAL", 2 * 4 * 4 * 4)
    went = []
    monkeypatch.setattr(pooling._Pool, "apply", lambda x: went.append(1) or x)
    x, pool = images(2, 4, 4, 4), MaxPool2()
    for _ in range(3):
        pool(x)
    assert went == [1, 1]  # the first call filled the trial


@pytest.mark.parametrize(("shape", "size"), [((14, 14), 7), ((16, 12), 7), ((5, 3), 7), ((6, 9), (None, 2))])
def test_means_that_repeat_themselves_are_those_of_torch(shape, size):
    """On a GPU that has to repeat itself; values and gradients, also where windows overlap. On a CPU it is torch's."""
    x = torch.linspace(-1, 1, 6 * shape[0] * shape[1], dtype=torch.float64).sin().view(2, 3, *shape)
    layer, plain = pooling.MeanPool(size), torch.nn.AdaptiveAvgPool2d(size)
    expected = plain(x)
    rows, columns = expected.shape[2:]
    own, theirs = (x.clone().requires_grad_() for _ in range(2))
    found = pooling._means(own, rows, columns)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found.square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=1e-12)
    assert torch.equal(layer(x), expected)
