"""Picture files to one uint8 array: decoded by Pillow (which torchvision uses), scaled, cropped, many at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import IntArray
from fedcross.tasks.reading.cache import Array, Store

if TYPE_CHECKING:
    from PIL.Image import Image

Listing = Sequence[tuple[Path, int]]
"""Picture files and their labels."""


def decode_pictures(part: str, listing: Listing, size: int, channels: int, store: Store) -> None:
    """Store ``x_PART`` uint8 ``(n, channels, size, size)`` and ``y_PART``.

    The shorter side is scaled to `size` (bilinear with antialiasing) unless it has it, then the middle is cropped.

    Raises
    ------
    DataError
        If a file is missing or is no whole picture; names it.
    """
    x = store.new(f"x_{part}", (len(listing), channels, size, size), np.uint8)
    store.put(f"y_{part}", np.array([label for _, label in listing], dtype=np.int64))

    def one(index: int) -> None:
        x[index] = read_picture(listing[index][0], size, channels)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow releases the GIL while it decodes
        for _ in pool.map(one, range(len(listing))):
            pass


def read_picture(path: Path, size: int, channels: int) -> Array:
    """Return the picture in a file as uint8 ``(channels, size, size)``."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            return shaped(file, size, channels)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a whole picture ({error}). Copy the file again or take it out.") from error


def shaped(given: Image, size: int, channels: int) -> Array:
    """Return one Pillow picture as uint8 ``(channels, size, size)``."""
    from PIL import Image

    picture = given.convert("RGB" if channels == 3 else "L")
    width, height = picture.size
    if min(width, height) != size:
        scale = size / min(width, height)
        width, height = max(size, round(width * scale)), max(size, round(height * scale))
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def take(listing: Listing, chosen: IntArray) -> Listing:
    """Return the chosen entries."""
    return [listing[int(index)] for index in chosen]
