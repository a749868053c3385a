"""The 2x2 max-pool behind a convolution is torch's, to the bit; a mean over a grid that repeats itself is torch's."""

import pytest
import torch
from torch import nn

from fedcross.tasks.models import pooling


def images(*shape, seed=1):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(50, 6, 28, 28), (3, 64, 8, 10), (1, 1, 2, 2), (2, 3, 5, 7)])
def test_the_compiled_pool_gives_torchs_values_and_places(shape):
    y = images(*shape).mul_(4).round_()  # many ties: of equal values the first
    found, expected = pooling._pool(y), nn.functional.max_pool2d(y, 2, return_indices=True)
    assert all(map(torch.equal, found, expected))
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_as_in_torch(value):
    y = images(4, 3, 6, 6)
    y[::2, 1, 2:4] = value
    for mine, reference in zip(pooling._pool(y), nn.functional.max_pool2d(y, 2, return_indices=True), strict=True):
        assert torch.equal(mine.nan_to_num(7), reference.nan_to_num(7))


@pytest.mark.parametrize("shape", [(3, 4, 7, 9), (2, 3, 8, 8)])
def test_the_pool_without_a_gradient_has_torchs_values(shape):
    x = images(*shape)
    x[0, 1, 2, 3] = torch.nan
    with torch.no_grad():
        mine, reference = pooling.MaxPool2()(x), nn.functional.max_pool2d(x, 2)
    assert torch.equal(mine.nan_to_num(7), reference.nan_to_num(7))
    with torch.no_grad(), pytest.raises(RuntimeError, match="small"):
        pooling.MaxPool2()(images(1, 1, 1, 4))


@pytest.mark.parametrize(("shape", "size"), [((14, 14), 7), ((16, 12), 7), ((5, 3), 7)])
def test_means_that_repeat_themselves_are_those_of_torch(shape, size):
    """On a GPU that has to repeat itself, also where windows overlap. On a CPU it is torch's."""
    x = torch.linspace(-1, 1, 6 * shape[0] * shape[1], dtype=torch.float64).sin().view(2, 3, *shape)
    expected = nn.AdaptiveAvgPool2d(size)(x)
    found = pooling._windows(x, shape[0], size) @ x @ pooling._windows(x, shape[1], size).T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(pooling.MeanPool(size)(x), expected)
