"""Scores of a model, by hand."""

import pytest
import torch

from fedcross.tasks.scoring import scores


def test_tied_chances_count_half_in_the_area():
    """Positive .5 ties with the negative .5: half of a pair; the other positive is above it: (.5 + 1) / 2."""
    found = scores(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 1]))
    assert found["auc"] == pytest.approx(0.75)
