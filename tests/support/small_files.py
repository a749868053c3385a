"""Small files in the published format of each data set, written by the tests that read them."""

import json
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image


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


def batch(data: np.ndarray, labels: dict[str, list[int]]) -> bytes:
    """A batch as Python 2 pickled the published ones: protocol 2."""
    return pickle.dumps({"data": data, **labels}, protocol=2)


def cifar10(root: Path, each: int = 20) -> np.ndarray:
    """Five training batches and one test batch of `each` pictures; returns the training pictures."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(2)
    rows = generator.integers(0, 256, (6, each, 3072), dtype=np.uint8)
    for name, data in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], rows):
        (folder / name).write_bytes(batch(data, {"labels": [i % 10 for i in range(each)]}))
    with (folder / "batches.meta").open("wb") as file:
        pickle.dump({"label_names": list("abcdefghij")}, file, protocol=2)
    return rows[:5].reshape(-1, 3, 32, 32)


def cifar100(root: Path, each: int = 40) -> np.ndarray:
    """Files train and test of `each` pictures, and meta; returns the training pictures."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    rows = np.random.default_rng(3).integers(0, 256, (2, each, 3072), dtype=np.uint8)
    for name, data in zip(("train", "test"), rows):
        labels = {"fine_labels": [i % 100 for i in range(each)], "coarse_labels": [i % 20 for i in range(each)]}
        (folder / name).write_bytes(batch(data, labels))
    meta = {"fine_label_names": [f"f{i}" for i in range(100)], "coarse_label_names": [f"c{i}" for i in range(20)]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    return rows[0].reshape(-1, 3, 32, 32)


def leaf(folder: Path, part: str, users: dict[str, tuple[list, list]], file: str = "all_data_0.json") -> Path:
    """One LEAF file of `users` (name to inputs and labels)."""
    path = folder / part / file
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))
    return path


def ink(value: int) -> list[float]:
    """A FEMNIST picture as LEAF writes it: 784 numbers k / 255, paper 1.0, one pixel of `value`."""
    return [value / 255] + [1.0] * 783


def femnist(root: Path) -> None:
    folder = root / "femnist" / "data"
    leaf(folder, "train", {"w2": ([ink(7), ink(8)], [61, 0]), "w1": ([ink(1)], [10])})
    leaf(folder, "train", {"w0": ([ink(0), ink(255)], [5, 6])}, file="all_data_1.json")
    leaf(folder, "test", {"w1": ([ink(3)], [11]), "w2": ([ink(4)], [12]), "w0": ([], [])})


def picture(path: Path, color: tuple[int, int, int] | int, size: tuple[int, int] = (64, 64)) -> None:
    """A picture of one colour; JPEG keeps it within a few grey levels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(color, tuple) else "L", size, color).save(path)


def tinyimagenet(root: Path, wnids: tuple[str, ...] = ("n02", "n01")) -> Path:
    folder = root / "tiny-imagenet-200"
    annotations = []
    for label, wnid in enumerate(wnids):
        for i in range(3):
            picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", (40 * label + 10, 20 * i, 200))
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        picture(folder / "val" / "images" / f"val_{label}.JPEG", 100 + label)  # grey: some published ones are
        annotations.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn99\tsomething else\n")
    return folder


def vireofood172(root: Path) -> Path:
    folder = root / "VireoFood172"
    entries = {"TR": ["/1/0_1.jpg", "/172/3_2.jpg", "/2/0_0.jpg"], "VAL": ["/2/5_5.jpg"], "TE": ["/172/9_9.jpg"]}
    for name, lines in entries.items():
        for line in lines:
            picture(folder / "ready_chinese_food" / line[1:], (int(line.split("/")[1]), 0, 0), (100, 80))
        (folder / "SplitAndIngreLabel").mkdir(exist_ok=True)
        (folder / "SplitAndIngreLabel" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "SplitAndIngreLabel" / "FoodList.txt").write_text("\n".join(f"dish {i}" for i in range(1, 173)) + "\n")
    return folder
