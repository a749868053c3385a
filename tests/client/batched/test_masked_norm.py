"""Batch normalisation of the real rows of a padded batch against torch's own of these rows alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcross.client.batched.masked_norm import masked

#: Sums in another order, in float64.
EXACT = 1e-12
OPTIONS: list[dict[str, Any]] = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
KINDS = [(nn.BatchNorm1d, (5, 3)), (nn.BatchNorm2d, (5, 3, 2, 3))]


def layer_of(kind: type[Any], **options: Any) -> Any:
    torch.manual_seed(3)
    layer = kind(3, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def batch(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2


def rows(real: int, size: int = 5) -> Tensor:
    return (torch.arange(size) < real).double()


def compare(layer: Any, x: Tensor, real: int) -> None:
    """Assert that output, gradients and statistics are those of the first `real` rows; padding has no gradient."""
    alone = copy.deepcopy(layer)
    own, padded = x[:real].clone().requires_grad_(), x.clone().requires_grad_()
    slope = batch(tuple(x.shape), 9)
    expected = alone(own)
    (expected * slope[:real]).sum().backward()
    with masked([nn.Sequential(layer)], rows(real)):
        found = layer(padded)
        assert found.shape == x.shape
        (found * slope).sum().backward()
    assert padded.grad is not None
    pairs = [(found[:real], expected), (padded.grad[:real], own.grad), (padded.grad[real:], torch.zeros_like(x[real:]))]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), alone.parameters(), strict=True)]
    pairs += list(zip(layer.buffers(), alone.buffers(), strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str
)
@pytest.mark.parametrize(("kind", "shape"), KINDS)
@pytest.mark.parametrize("real", [2, 4, 5])
def test_real_rows_are_normalised_as_if_alone(
    kind: type[Any], shape: tuple[int, ...], real: int, options: dict[str, Any]
) -> None:
    """Twice: with ``momentum=None`` the statistics are means over all batches."""
    layer = layer_of(kind, **options)
    for seed in (1, 2):
        layer.zero_grad()
        compare(layer, batch(shape, seed), real)


def test_one_picture_has_enough_values() -> None:
    compare(layer_of(nn.BatchNorm2d), batch((5, 3, 2, 3), 1), 1)


def test_one_row_of_vectors_leaves_the_statistics() -> None:
    """Its variance is not known; the batch still counts."""
    layer = layer_of(nn.BatchNorm1d)
    with masked([layer], rows(1)):
        layer(batch((5, 3), 1))
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert layer.running_var.tolist() == [1, 1, 1]
    assert int(layer.num_batches_tracked) == 1


def test_layers_that_stand_still_and_other_batches_are_torchs() -> None:
    """The method may make examples itself: their rows are all real."""
    layer = layer_of(nn.BatchNorm1d)
    compare(layer, batch((5, 3), 1), 4)
    alone = copy.deepcopy(layer)
    with masked([layer], rows(2)):
        assert torch.equal(layer(batch((4, 3), 2)), alone(batch((4, 3), 2)))
        assert torch.equal(layer.eval()(batch((5, 3), 3)), alone.eval()(batch((5, 3), 3)))
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), alone.buffers(), strict=True))
    assert "forward" not in vars(layer)


def test_narrow_inputs_are_computed_in_the_type_of_the_weights() -> None:
    layer = layer_of(nn.BatchNorm1d).float()
    x = batch((5, 3), 1).bfloat16()
    alone = copy.deepcopy(layer)
    expected = alone(x[:3].float())
    with masked([layer], rows(3)):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[:3], expected.bfloat16())
    torch.testing.assert_close(layer.running_var, alone.running_var, rtol=1e-6, atol=0)
