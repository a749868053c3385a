"""Augmentation in batches against torchvision's image by image, and its draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcross.core.errors import ConfigError
from fedcross.tasks import augment
from fedcross.tasks.augment import Augment, build
from tests.support.emulated_gpu import emulated_gpu


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


def test_flip_mirrors_about_half() -> None:
    """Of 400 images 200 are expected, with standard deviation 10."""
    x = images(400)
    out = made(flip=True)(x, generator())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(out, x, strict=True)]
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, out, x, strict=True))
    assert 150 <= sum(mirrored) <= 250


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


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_boxes_lie_inside(height: int, width: int, seed: int) -> None:
    top, left, h, w = augment.boxes(50, height, width, generator(seed)).unbind(1)
    assert bool(((h >= 1) & (w >= 1) & (top >= 0) & (left >= 0) & (top + h <= height) & (left + w <= width)).all())


def test_boxes_have_the_published_areas_and_ratios() -> None:
    """A try of area share a and log ratio s fits if a <= t = exp(-|s|), s uniform up to L = log 4/3 = .2877.

    Among those that fit the mean area is E[(t^2 - .08^2) / 2] / E[t - .08], with E[t] = (1 - 3/4)/L = .8690 and
    E[t^2] = (1 - 9/16)/(2 L) = .7604: .4778. One area's standard deviation is under .29, that of 4,000 under .005.
    """
    _, _, h, w = augment.boxes(4000, 200, 200, generator()).double().unbind(1)
    ratio, area = w / h, h * w / 40_000
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.35
    assert 0.07 < area.min() < 0.09
    assert abs(area.mean() - 0.4778) < 0.02


def test_no_box_fits_gives_the_central_one() -> None:
    """In 4x400 pixels the smallest area, .08 * 1600 = 128, is at least sqrt(128 * 3/4) = 9.8 high: no try fits."""
    box = augment.boxes(200, 4, 400, generator())
    central = (box == torch.tensor([0, (400 - 5) // 2, 4, 5])).all(dim=1)  # 4 * 4/3 = 5.33 rounds to 5
    assert central.all()


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


def test_memory_layout_does_not_matter() -> None:
    x = images(8)
    change = made(crop=2, flip=True, rotate=15, resized_crop=True)
    last = change(x.to(memory_format=torch.channels_last), generator())
    torch.testing.assert_close(last, change(x, generator()))


def test_nothing_asked_is_none_and_faults_are_named() -> None:
    assert build(None) is None
    assert build({}) is None
    assert build(Augment(crop_padding="reflect")) is None
    with pytest.raises(ConfigError, match=r"augment\.crop=-1"):
        build({"crop": -1})
    with pytest.raises(ConfigError, match="Did you mean 'flip'"):
        build({"flipp": True})


def test_numbers_cross_to_a_gpu_in_one_piece_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    every: dict[str, Any] = {"crop": 2, "resized_crop": True, "flip": True, "rotate": 15.0}
    x = images(12)
    plain = made(**every)(x, generator(4))
    with emulated_gpu(monkeypatch) as counted:
        held = x.to("cuda:0")
        counted.waits.clear()
        found = made(**every)(held, generator(4))
        assert counted.waits == []
        assert counted.copies == 1
        assert torch.equal(found.cpu(), plain)
