"""Augmentation of training images: on whole batches of prepared tensors, on their device, one draw per image.

All draws come from the generator that is passed in, in a fixed order, so (seed, round, client) decide the batch. The
trainers give a CPU generator, so that the draws do not depend on the device. Its few numbers per image are drawn for
all changes first and copied over in one piece, for which the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings, parse

Augmentation = Callable[[Tensor, Generator], Tensor]
#: One change: ``draw(n, height, width, generator)`` -> numbers (n, ...); ``apply(images, numbers)`` -> images.
Change = tuple[Callable[[int, int, int, Generator], Tensor], Callable[[Tensor, Tensor], Tensor]]

# Random resized crop (Szegedy et al. 2015): share of the area, ratio of width to height, tries before the central crop.
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10


class Augment(Settings):
    """Which changes, applied in the order of the attributes; none by default, as in FedCross.

    Attributes
    ----------
    crop : int
        Pixels of padding on each side before a random crop to the old size.
    crop_padding : {"zero", "reflect"}
        What the padding holds; zero is that of the normalised tensor, the mean colour.
    resized_crop : bool
        Crop a random box and resize it to the old size, bilinear.
    flip : bool
        Mirror left and right with probability 1/2.
    rotate : float
        Largest angle in degrees; nearest pixel, corners filled with zero.
    """

    crop: int = Field(default=0, ge=0)
    crop_padding: Literal["zero", "reflect"] = "zero"
    resized_crop: bool = False
    flip: bool = False
    rotate: float = Field(default=0.0, ge=0, le=180)


def build(spec: Augment | Mapping[str, Any] | None) -> Augmentation | None:
    """Return a function ``(images, generator) -> images``, or None if `spec` asks for nothing.

    Images are floating point ``(n, channels, height, width)`` on any device. A wrong value is a ConfigError.
    """
    if spec is None:
        return None
    if not isinstance(spec, Augment):
        faults: list[str] = []
        parsed = parse(Augment, spec, "augment", faults)
        if parsed is None:
            raise ConfigError(faults)
        spec = parsed
    changes: list[Change] = []
    if spec.crop:
        cut = partial(crop, padding=spec.crop, reflect=spec.crop_padding == "reflect")
        changes.append((partial(offsets, most=2 * spec.crop), cut))
    if spec.resized_crop:
        changes.append((boxes, resized_crop))
    if spec.flip:
        changes.append((sides, flip))
    if spec.rotate:
        changes.append((partial(rotations, degrees=spec.rotate), rotate))
    return partial(_chain, changes=tuple(changes)) if changes else None


def _chain(x: Tensor, generator: Generator, *, changes: tuple[Change, ...]) -> Tensor:
    n, _, height, width = x.shape
    drawn = [draw(n, height, width, generator) for draw, _ in changes]
    for (_, apply), numbers in zip(changes, drawn if generator.device == x.device else _brought(drawn, x), strict=True):
        x = apply(x, numbers)
    return x


def _brought(drawn: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return `drawn` on the device of `x`, copied in one piece; as float32 unless `x` is float64 (MPS has none)."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    row = torch.cat([numbers.reshape(-1).to(kind) for numbers in drawn])
    if x.device.type == "cuda":
        row = row.pin_memory()  # from other memory the host would have to wait
    moved = torch.split(row.to(x.device, non_blocking=True), [numbers.numel() for numbers in drawn])
    shaped = [piece.view(numbers.shape) for piece, numbers in zip(moved, drawn, strict=True)]
    return [new if old.is_floating_point() else new.to(old.dtype) for new, old in zip(shaped, drawn, strict=True)]


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Return float64 draws in [0, 1) on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def _integers(draws: Tensor, limits: Tensor | int) -> Tensor:
    """Map draws in [0, 1) to int64 in {0, ..., limits - 1}, elementwise."""
    top = torch.as_tensor(limits, device=draws.device)
    return torch.minimum((draws * top).long(), top - 1)  # a product may round up to its limit


def offsets(n: int, height: int, width: int, generator: Generator, *, most: int) -> Tensor:  # noqa: ARG001
    """Draw where windows of `n` images begin, int64 (n, 2): rows and columns, each in {0, ..., most}."""
    return _integers(_uniform((n, 2), generator), most + 1)


def crop(x: Tensor, starts: Tensor, *, padding: int, reflect: bool) -> Tensor:
    """Pad by `padding` pixels on each side, then take a window of the old size at `starts` (n, 2)."""
    n, _, height, width = x.shape
    padded = F.pad(x, (padding,) * 4, mode="reflect" if reflect else "constant")
    rows = starts[:, 0, None] + torch.arange(height, device=x.device)
    columns = starts[:, 1, None] + torch.arange(width, device=x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def sides(n: int, height: int, width: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """Draw for `n` images whether they are mirrored, with probability 1/2, bool (n,)."""
    return _uniform((n,), generator) < 0.5


def flip(x: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror the images left and right for which `mirrored` (n,) is true."""
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def rotations(n: int, height: int, width: int, generator: Generator, *, degrees: float) -> Tensor:
    """Draw rotations by uniform angles in [-degrees, degrees], float64 (n, 2, 3), from output to input positions."""
    angle = torch.deg2rad((2 * _uniform((n,), generator) - 1) * degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    zero = torch.zeros_like(angle)
    theta = torch.stack((cos, -sin * height / width, zero, sin * width / height, cos, zero), dim=1)
    return theta.reshape(-1, 2, 3)


def rotate(x: Tensor, theta: Tensor) -> Tensor:
    """Rotate each image about its centre, counter-clockwise, by `theta` (n, 2, 3) of :func:`rotations`."""
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def boxes(n: int, height: int, width: int, generator: Generator) -> Tensor:
    """Draw `n` boxes of random area and shape inside an image, int64 (n, 4): top, left, height, width in pixels.

    The first of ten tries that fits counts; if none does, the largest central box of allowed shape.
    """
    draws = _uniform((n, 2 * TRIES + 2), generator)
    area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * draws[:, :TRIES])
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    ratio = torch.exp(low + (high - low) * draws[:, TRIES : 2 * TRIES])
    w, h = torch.sqrt(area * ratio).round().long(), torch.sqrt(area / ratio).round().long()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    central_h, central_w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    none = ~fits.any(dim=1)
    h = torch.where(none, central_h, h.gather(1, first)[:, 0])
    w = torch.where(none, central_w, w.gather(1, first)[:, 0])
    top = torch.where(none, (height - central_h) // 2, _integers(draws[:, -2], height - h + 1))
    left = torch.where(none, (width - central_w) // 2, _integers(draws[:, -1], width - w + 1))
    return torch.stack((top, left, h, w), dim=1)


def resized_crop(x: Tensor, cut: Tensor) -> Tensor:
    """Cut a box `cut` (n, 4) of :func:`boxes` from each image and resize it to its size, bilinear within the box."""
    n, _, height, width = x.shape
    top, left, h, w = cut.to(x.dtype)[:, :, None].unbind(1)

    def positions(start: Tensor, length: Tensor, size: int) -> Tensor:
        """Return where output pixels lie in the input, normalised to [-1, 1], shape (n, size)."""
        centre = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) * length / size - 0.5
        inside = start + torch.minimum(centre.clamp(min=0), length - 1)  # nothing from outside the box
        return (2 * inside + 1) / size - 1

    rows = positions(top, h, height)[:, :, None].expand(n, height, width)
    columns = positions(left, w, width)[:, None, :].expand(n, height, width)
    grid = torch.stack((columns, rows), dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
