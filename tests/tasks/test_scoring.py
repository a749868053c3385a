"""Scores of a model, by hand."""

import math

import pytest
import torch

from fedcross.core.errors import DataError
from fedcross.tasks.scoring import score, scores
from tests.support.federation import run


def test_tied_chances_count_half_in_the_area():
    """Positive .5 ties with the negative .5: half of a pair; the other positive is above it: (.5 + 1) / 2."""
    found = scores(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 1]))
    assert found["auc"] == pytest.approx(0.75)


def test_a_score_by_hand_over_two_batches():
    """Scores (log 3, 0): 3/4 for class 0, which is right twice of three times. No example is of class 2."""
    logits = torch.tensor([[math.log(3), 0.0, -1e9]] * 3)
    found = score(lambda x: x, logits, torch.tensor([0, 1, 0]), 3, batch=2)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 3)
    assert found.per_class == pytest.approx((1.0, 0.0, math.nan), nan_ok=True)


def test_without_test_examples_a_run_does_not_begin(tmp_path):
    (tmp_path / "data.csv").write_text("a,label\n" + "1,x\n2,y\n" * 8)
    with pytest.raises(DataError, match="no test examples"):
        run(tmp_path / "run", "task=table", f"data_root={tmp_path}", "model=mlp", "task.test_fraction=0")
