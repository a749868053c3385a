"""Small files in the published format of each data set, written by the tests that read them."""

import pickle
import struct
from pathlib import Path

import numpy as np


def idx(path: Path, array: np.ndarray) -> None:
    """An idx file: magic 0x08 (uint8) and the number of dimensions, big-endian sizes, then the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">I", 0x0800 + array.ndim) + b"".join(struct.pack(">I", size) for size in array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


def mnist(root: Path, train: int = 30, test: int = 10) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    made = {}
    for prefix, count in (("train", train), ("t10k", test)):
        made[f"x_{prefix}"] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"y_{prefix}"] = np.arange(count) % 10
        idx(root / "MNIST" / "raw" / f"{prefix}-images-idx3-ubyte", made[f"x_{prefix}"])
        idx(root / "MNIST" / "raw" / f"{prefix}-labels-idx1-ubyte", made[f"y_{prefix}"])
    return made


def python2_batch(data: np.ndarray, labels: dict[str, list[int]]) -> bytes:
    """A batch as Python 2 and numpy 1 pickled the published ones: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    rows, columns = data.shape
    raw = data.tobytes()
    out = b"\x80\x02}(" + text(b"data")
    out += b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR"
    out += b"(K\x01" + b"J" + struct.pack("<i", rows) + b"J" + struct.pack("<i", columns) + b"\x86"
    out += b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|")
    out += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    out += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    for key, values in labels.items():
        out += text(key.encode()) + b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"
    return out + b"u."


def cifar10(root: Path, each: int = 20) -> np.ndarray:
    """Five training batches and one test batch of `each` pictures; returns the training pictures."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(2)
    rows = generator.integers(0, 256, (6, each, 3072), dtype=np.uint8)
    for name, data in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], rows):
        (folder / name).write_bytes(python2_batch(data, {"labels": [i % 10 for i in range(each)]}))
    with (folder / "batches.meta").open("wb") as file:
        pickle.dump({"label_names": list("abcdefghij")}, file, protocol=2)
    return rows[:5].reshape(-1, 3, 32, 32)
