"""The aggregation benchmark measures what it says; its times are not judged here."""

import argparse

import pytest

from benchmarks import aggregation
from benchmarks.shapes import float_values, shapes


def test_the_models_have_the_papers_sizes():
    """LeNet-5: 456 + 2,416 + 48,120 + 10,164 + 850 = 62,006.

    The others as torchvision's networks count them, ResNet-18 with a 3x3 stem; running statistics come on top.
    """
    assert float_values(shapes("lenet5")) == 62_006
    assert float_values(shapes("resnet18")) == 11_173_962 + 2 * 4800
    assert float_values(shapes("vgg16")) == 138_357_544
    # VGG16-BN for 32x32: 33,646,666 weights and 2 * 4,224 running statistics
    assert float_values(shapes("vgg16_bn")) == 33_646_666 + 2 * 4224


@pytest.mark.parametrize("case", [aggregation.pool_case, aggregation.loop_case])
def test_a_case_gives_times_and_memory(case):
    result = case("lenet5", 3, 2, 0.0)
    assert all(seconds > 0 for seconds in result["median"].values())
    assert result["low"] <= result["median"]["total"] <= result["high"]
    assert result["peak"] >= 0
    if case is aggregation.pool_case:
        assert set(result["median"]) == {"read", "scale", "gram", "mixing", "fused", "bound", "total"}


def test_a_case_that_does_not_fit_says_why(monkeypatch):
    """4 models of 138,357,544 values and a tensor of 25,088 x 4,096, 4 bytes each: 2.44 GiB, and half a GiB more."""
    monkeypatch.setattr(aggregation, "free_bytes", lambda: 2**30)
    args = argparse.Namespace(repeats=1, patience=0.0, loop=True)
    row = aggregation.row("vgg16", 4, args)
    assert "left out: needs 2.9 GiB, 1.0 GiB are free" in row
    assert row.count("|") == aggregation.HEADER.count("|")


def test_a_row_has_the_table_s_columns(monkeypatch):
    times = dict.fromkeys(("read", "scale", "gram", "mixing", "fused", "bound", "total"), 0.5)
    result = {"median": times, "low": 0.4, "high": 0.6, "repetitions": 3, "foreign": 0.0, "peak": 2 * 4 * 62_006}
    monkeypatch.setattr(aggregation, "run_case", lambda *_: result)
    row = aggregation.row("lenet5", 2, argparse.Namespace(loop=True))
    assert row.count("|") == aggregation.HEADER.count("|")
    assert "| 0.500 (**1.0**) | 1.00 | 0% |" in row
