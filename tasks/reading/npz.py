"""Reading ``.npz`` files without running what is in them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Arrays


def read_npz(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Return the named arrays of `path`.

    Raises
    ------
    DataError
        If the file is damaged, holds Python objects, or lacks a needed array; names the file.
    """
    try:
        with path.open("rb") as file:  # numpy would leave it open if the zip is damaged
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: one .npy array, expected an .npz with {', '.join(needed)}.")
            missing = [name for name in needed if name not in content]
            if missing:
                raise DataError(f"{path}: no {', '.join(missing)} in it; it has {', '.join(content.files)}.")
            return {name: content[name] for name in (*needed, *optional) if name in content}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole .npz of plain arrays ({error}). Make it again with numpy.savez."
        ) from error
