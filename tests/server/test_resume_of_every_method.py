"""Every method: a run that is resumed after each of its rounds ends as one that was never interrupted, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedcross.conf.compose import CONF
from tests.support.federation import run

#: Trains two federations for each method.
pytestmark = pytest.mark.slow

METHODS = sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
ROUNDS = 4
#: Trained like this, a few rounds change much.
SETTINGS = ("partition=dirichlet", "partition.min_size=5", "train.batch=8", "train.lr=0.1", "checkpoint.every=1")
#: Large enough that the order of a sum shows: in a tiny model it hides.
WIDE = ("model=mlp", "model.hidden=[256,128]")


def settings_of(method: str) -> list[str]:
    """Return what the method needs besides the small federation's settings."""
    model = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else list(WIDE)
    devices = ["devices=three_sizes"] if "sizes" in method or method in ("heterofl", "adaptivefl") else []
    whole = ["method.whole=1"] if method == "fedfan_three_sizes" else []
    return [*SETTINGS, f"method={method}", *model, *devices, *whole]


@pytest.mark.parametrize("method", METHODS)
def test_a_resume_after_every_round_changes_no_bit(tmp_path: Path, method: str) -> None:
    own = [*settings_of(method), f"rounds={ROUNDS}"]
    whole = run(tmp_path / "whole", *own)
    cut = run(tmp_path / "cut", *own, "stop_at=1")
    for number in range(2, ROUNDS + 1):
        cut = run(tmp_path / "cut", *own, f"stop_at={number}", f"resume={tmp_path / 'cut'}")
    ours, theirs = whole.method.state(), cut.method.state()
    assert set(ours.arrays) == set(theirs.arrays)
    for name, array in ours.arrays.items():
        np.testing.assert_array_equal(theirs.arrays[name], array, err_msg=name)
    assert ours.values == theirs.values
