"""Augmentation in batches against torchvision's image by image, and its draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcross.core.errors import ConfigError
from fedcross.tasks import augment
from fedcross.tasks.augment import Augment, build


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, channels: int = 3, height: int = 8, width: int = 8) -> Tensor:
    return torch.randn(n, channels, height, width, generator=generator(99))


def made(**values: Any) -> Callable[[Tensor, torch.Generator], Tensor]:
    function = build(values)
    assert function is not None
    return function


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_crop_is_a_window_of_the_padded_image(padding: str) -> None:
    """Every image is one of the (2*2+1)^2 windows, and 400 images meet all 25 (missing one: 25 * .96^400 = 2e-6)."""
    x = images(400, height=5, width=7)
    out = made(crop=2, crop_padding=padding)(x, generator())
    mode = "constant" if padding == "zero" else "reflect"
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2), mode=mode)
    found = set()
    for i in range(400):
        windows = [
            (r, c) for r in range(5) for c in range(5) if torch.equal(padded[i, :, r : r + 5, c : c + 7], out[i])
        ]
        assert len(windows) == 1
        found.update(windows)
    assert len(found) == 25


@pytest.mark.parametrize("shape", [(8, 8), (6, 12)])
def test_rotation_equals_torchvision(shape: tuple[int, int]) -> None:
    from torchvision.transforms import InterpolationMode  # here, because it takes seconds and others need it not
    from torchvision.transforms import functional as reference

    x = images(20, height=shape[0], width=shape[1])
    out = made(rotate=15)(x, generator(3))
    angles = (2 * torch.rand(20, generator=generator(3), dtype=torch.float64) - 1) * 15
    assert angles.min() < -5
    assert angles.max() > 5
    for image, angle, rotated in zip(x, angles, out, strict=True):
        expected = reference.rotate(image, float(angle), InterpolationMode.NEAREST)
        # A position half way between two pixels may round either way.
        assert (rotated == expected).float().mean() > 0.97


@pytest.mark.parametrize("shape", [(8, 8), (9, 16)])
def test_resized_crop_equals_torchvision(shape: tuple[int, int]) -> None:
    from torchvision.transforms import functional as reference

    height, width = shape
    x = images(30, height=height, width=width)
    out = made(resized_crop=True)(x, generator(5))
    for image, box, resized in zip(x, augment.boxes(30, height, width, generator(5)).tolist(), out, strict=True):
        expected = reference.resized_crop(image, *box, [height, width], antialias=False)
        torch.testing.assert_close(resized, expected, rtol=1e-4, atol=1e-5)


def test_boxes_lie_anywhere_in_both_directions() -> None:
    top, left, h, w = augment.boxes(500, 8, 8, generator(5)).unbind(1)
    assert (top != left)[h == w].any()
    assert (top + h).max() == (left + w).max() == 8
    assert top.min() == left.min() == 0


def test_boxes_have_areas_and_shapes_within_the_limits() -> None:
    """Of 100 x 100 pixels 8 to 100 %, shapes from 3/4 to 4/3; rounding moves a side of 28 by half a pixel, 2 %."""
    _, _, h, w = augment.boxes(2000, 100, 100, generator(7)).double().unbind(1)
    assert 0.075 < (h * w / 1e4).min() < 0.09
    assert (h * w / 1e4).max() > 0.9
    assert 0.72 < (w / h).min() < 0.77
    assert 1.3 < (w / h).max() < 1.39


def test_flip_mirrors_about_half_of_the_images_left_and_right() -> None:
    """Of 400 fair draws 160 to 240 (four standard deviations)."""
    x = images(400)
    out = made(flip=True)(x, generator())
    mirrored = (out == x.flip(-1)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(out == x).flatten(1).all(1))
    assert 160 < mirrored.sum() < 240


def test_generator_decides_everything() -> None:
    x = images(16)
    change = made(crop=2, flip=True, rotate=15, resized_crop=True)
    before = torch.get_rng_state()
    a, b, c = change(x, generator(1)), change(x, generator(1)), change(x, generator(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)
    assert a.shape == x.shape
    assert a.dtype == x.dtype
    assert torch.equal(x, images(16))  # the input stays


def test_nothing_asked_is_none_and_faults_are_named() -> None:
    assert build(None) is None
    assert build({}) is None
    assert build(Augment(crop_padding="reflect")) is None
    with pytest.raises(ConfigError, match=r"augment\.crop=-1"):
        build({"crop": -1})
    with pytest.raises(ConfigError, match="Did you mean 'flip'"):
        build({"flipp": True})
