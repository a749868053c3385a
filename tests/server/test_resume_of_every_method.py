"""Every method: a run that is resumed after each of its rounds ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcross.conf.compose import CONF
from fedcross.tasks.models.width import Hidden
from tests.support.federation import run

#: Trains two federations for each method.
pytestmark = pytest.mark.slow

METHODS = sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
ROUNDS = 3
#: Trained like this, a few rounds change much.
SETTINGS = ("partition=dirichlet", "partition.min_size=5", "train.batch=8", "train.lr=0.1", "checkpoint.every=1")
#: Large enough that the order of a sum shows: in a tiny model it hides.
WIDE = ("model=own", "model.path=tests.server.test_resume_of_every_method:Scaled")


class Scaled(nn.Module):
    """A network with a scalar that is trained, as CLIP's temperature, and one that is not."""

    def __init__(self, classes: int, shape: tuple[int, ...], width: float = 1.0) -> None:
        super().__init__()
        of = width if isinstance(width, Hidden) else Hidden()
        wide, embedding = of(256), of(128)
        layers = nn.Linear(math.prod(shape), wide), nn.ReLU(), nn.Linear(wide, embedding), nn.ReLU()
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(embedding, classes)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("version", torch.tensor(2**53 + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.classifier(self.features(x)) * self.temperature
        return logits


def settings_of(method: str) -> list[str]:
    """Return what the method needs besides the small federation's settings."""
    model = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else list(WIDE)
    devices = ["devices=three_sizes"] if "sizes" in method or method in ("heterofl", "adaptivefl") else []
    whole = ["method.whole=1"] if method == "fedfan_three_sizes" else []
    short = ["method.generator_steps=3"] if method.startswith("fedgen") else []
    return [*SETTINGS, f"method={method}", *model, *devices, *whole, *short]


@pytest.mark.parametrize("method", METHODS)
def test_a_resume_after_every_round_changes_no_bit(tmp_path: Path, method: str) -> None:
    own = [*settings_of(method), f"rounds={ROUNDS}"]
    whole = run(tmp_path / "whole", *own)
    cut = run(tmp_path / "cut", *own, "stop_at=1")
    for number in range(2, ROUNDS + 1):
        cut = run(tmp_path / "cut", *own, f"stop_at={number}", f"resume={tmp_path / 'cut'}")
    ours, theirs = whole.driver.checkpoint(), cut.driver.checkpoint()
    assert set(ours.arrays) == set(theirs.arrays)
    for name, array in ours.arrays.items():
        assert theirs.arrays[name].shape == array.shape, name  # the next line takes a scalar for a list of one
        np.testing.assert_array_equal(theirs.arrays[name], array, err_msg=name)
    model = whole.driver.global_model()
    assert all(array == 2**53 + 1 for name, array in model.items() if name == "version")
    assert ours.values == theirs.values
