"""Picture files to one uint8 array: decoded by Pillow, scaled, cropped, many at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Array, Arrays, cached

if TYPE_CHECKING:
    from PIL.Image import Image

Listing = Sequence[tuple[Path, int]]
"""Picture files and their labels."""


def pictures(name: str, listings: Mapping[str, Listing], size: int, channels: int) -> Arrays:
    """Return ``x_PART`` uint8 ``(n, channels, size, size)`` and ``y_PART`` of the listed pictures, from the cache.

    The shorter side is scaled to `size` (bilinear with antialiasing), then the middle is cropped.
    """

    def decode(folder: Path) -> Arrays:
        for part, listing in listings.items():
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(listing), channels, size, size)}
            with (folder / f"x_{part}.npy").open("wb") as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                np.lib.format.write_array_header_1_0(file, header)  # row by row: all may not fit into memory
                for picture in pool.map(lambda entry: read_picture(entry[0], size, channels), listing):
                    file.write(picture.tobytes())
        return labels

    labels = {f"y_{part}": np.array([label for _, label in rows], np.int64) for part, rows in listings.items()}
    files = [path for listing in listings.values() for path, _ in listing]
    numbers = {part: array.tolist() for part, array in labels.items()}
    return cached(name, files, {"size": size, "channels": channels, **numbers}, decode)


def read_picture(path: Path, size: int, channels: int) -> Array:
    """Return one picture as uint8 ``(channels, size, size)``."""
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
