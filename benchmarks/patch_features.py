"""Makes features of CIFAR-10 by fixed random patches, for experiments in which only what follows them is trained.

``python -m benchmarks.patch_features --root DIR`` reads ``DIR/cifar-10-batches-py`` and writes ``DIR/patches.npz`` for
``task=arrays task.file=patches.npz``. Each filter is a patch of a training image at a random place, without its mean
and with unit norm. A feature is the filter's response, above a threshold, to either side of 0, summed over one
quadrant of the image (Coates, Lee and Ng, An Analysis of Single-Layer Networks, 2011, with random patches as filters).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcross.tasks.cifar10 import Params, load

#: Width of a patch, in pixels.
SIZE = 6
#: Images at a time.
CHUNK = 250


def filters(images: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """Return `count` patches of random `images` (n, 3, h, w) as filters (count, 3, SIZE, SIZE)."""
    n, _, height, width = images.shape
    rows = zip(
        generator.integers(0, n, count),
        generator.integers(0, height - SIZE + 1, count),
        generator.integers(0, width - SIZE + 1, count),
        strict=True,
    )
    cut = torch.stack([images[i, :, top : top + SIZE, left : left + SIZE] for i, top, left in rows])
    cut = cut - cut.mean(dim=(1, 2, 3), keepdim=True)
    return functional.normalize(cut.flatten(1), eps=1e-6).view_as(cut)


@torch.no_grad()
def features(images: Tensor, bank: Tensor, threshold: float) -> Tensor:
    """Return the features of `images`, (n, 8 * filters): both signs, four quadrants."""
    rows = []
    for first in range(0, len(images), CHUNK):
        response = functional.conv2d(images[first : first + CHUNK], bank)
        sides = torch.cat([response - threshold, -response - threshold], dim=1).clamp_(min=0)
        rows.append(functional.adaptive_avg_pool2d(sides, 2).flatten(1))
    return torch.cat(rows)


def main() -> None:
    """Write the file."""
    line = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    line.add_argument("--root", type=Path, required=True, help="folder of cifar-10-batches-py, and of the result")
    line.add_argument("--filters", type=int, default=128, help="number of patches (default: 128, 1,024 features)")
    line.add_argument("--limit", type=int, default=10_000, help="training images (default: 10,000)")
    line.add_argument(
        "--threshold", type=float, default=0.25, help="response below which a feature is 0 (default: .25)"
    )
    line.add_argument("--seed", type=int, default=1)
    options = line.parse_args()
    task = load(Params.model_validate({"root": options.root, "mean": [0.4914, 0.4822, 0.4465], "std": [0.25] * 3,
                                       "limit": options.limit}))  # fmt: skip
    inputs = {name: task.prepare(np.array(part.x)) for name, part in
              (("train", task.train), ("test", task.test))}  # fmt: skip
    bank = filters(inputs["train"], options.filters, np.random.default_rng(options.seed))
    found = {name: features(x, bank, options.threshold) for name, x in inputs.items()}
    mean, std = found["train"].mean(0), found["train"].std(0).clamp(min=1e-6)
    x, x_test = (((found[name] - mean) / std).numpy() for name in ("train", "test"))
    np.savez(options.root / "patches.npz", x=x, y=task.train.y, x_test=x_test, y_test=task.test.y)
    print(f"{options.root / 'patches.npz'}: {len(x)} + {len(x_test)} examples of {x.shape[1]} features")


if __name__ == "__main__":
    main()
