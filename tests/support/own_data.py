"""Small files of a user's own, for tests of own data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHORT = 20


def columns(rows: int) -> dict[str, list[object]]:
    """Return the columns of a small table of fields: three features, the owner and the label."""
    return {
        "height": [i * 0.5 + 1 for i in range(rows)],
        "weight": [i % 7 for i in range(rows)],
        "wet": [i % 3 == 0 for i in range(rows)],
        "farm": [f"f{i % 5}" for i in range(rows)],
        "kind": ["wheat" if i % 7 > 3 else "barley" for i in range(rows)],
    }


def write_csv(path: Path, rows: int) -> None:
    """Write the table as CSV."""
    table = columns(rows)
    lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values()))]
    path.write_text("\n".join(lines) + "\n")


def save(folder: Path) -> None:
    """Write four data sets of the library ``datasets``: ``numbers``, ``arrays``, ``texts``, ``pictures``."""
    from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, Value, disable_progress_bars
    from PIL import Image as Pictures

    disable_progress_bars()
    label = [i % 2 for i in range(SHORT)]
    numbers = {"a": [float(i) for i in range(SHORT)], "b": list(range(SHORT)), "label": label}
    Dataset.from_dict(numbers).save_to_disk(str(folder / "numbers"))
    kind = Features({"x": Array2D((4, 5), "float32"), "label": ClassLabel(names=["no", "yes"])})
    pixels = np.random.default_rng(1).random((SHORT, 4, 5), np.float32)
    parts = {
        name: Dataset.from_dict({"x": list(pixels[:n]), "label": label[:n]}, features=kind)
        for name, n in (("train", SHORT), ("test", 3))
    }
    DatasetDict(parts).save_to_disk(str(folder / "arrays"))
    half = SHORT // 2
    texts = {"text": [f"word{i} word" for i in label], "label": ["x", "y"] * half, "who": ["a", "b"] * half}
    Dataset.from_dict(texts).save_to_disk(str(folder / "texts"))
    picture = Features({"image": Image(), "label": Value("int64")})
    pictures = [Pictures.fromarray(np.full((9, 8), 10 * i, np.uint8)) for i in range(SHORT)]
    Dataset.from_dict({"image": pictures, "label": label}, features=picture).save_to_disk(str(folder / "pictures"))
