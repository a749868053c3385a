"""Sharpness and directions, by hand on small functions; the pictures of two tiny runs."""

import json
import math

import numpy as np
import pytest
import torch

from fedcross.analysis.landscape import Point, filter_normalised, surface
from fedcross.analysis.sharpness import epsilon_sharpness, hessian_times, largest_eigenvalue
from tests.server.commands.test_run import SMALL, call
from tests.support.command import subcommand

main = subcommand("landscape")


def quadratic(*curvatures: float):
    """f(w) = 1/2 sum_i a_i w_i^2, so H = diag(a)."""
    a = torch.tensor(curvatures)
    return lambda w: 0.5 * (a * w * w).sum()


def test_hessian_times_a_vector():
    # H = diag(2, 3), so H (1, 1) = (2, 3), anywhere.
    assert hessian_times(quadratic(2.0, 3.0), torch.tensor([5.0, -1.0]), torch.ones(2)).tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("curvatures", "largest"),
    [
        ((1.0, 3.0, 2.0), 3.0),
        ((1.0, -5.0, 2.0), 2.0),  # the magnitude is largest at -5: found by the second, shifted iteration
        ((-1.0, -4.0), -1.0),  # a maximum: the largest eigenvalue is negative
        ((0.0, 0.0), 0.0),
    ],
)
def test_the_largest_eigenvalue(curvatures, largest):
    point, start = torch.zeros(len(curvatures)), torch.ones(len(curvatures))
    value, vector = largest_eigenvalue(quadratic(*curvatures), point, start, steps=200, tolerance=1e-7)
    assert value == pytest.approx(largest, abs=1e-3)
    if any(curvatures):
        assert int(vector.abs().argmax()) == int(np.argmax(curvatures))


def test_epsilon_sharpness_of_a_linear_loss_is_exact():
    # L = 2 + 3 w_1 - w_2 at w = (1, -3) is 8. Box: eps (2, 4). Largest at a corner: + eps (3*2 + 1*4) = 10 eps.
    # 100 * 0.1 / (1 + 8) with eps = 0.01.
    found = epsilon_sharpness(lambda w: 2 + 3 * w[0] - w[1], torch.tensor([1.0, -3.0]), epsilon=0.01)
    assert found == pytest.approx(100 * 0.1 / 9, rel=1e-4)


def test_epsilon_sharpness_grows_with_curvature():
    # L = a w^2 / 2 at w = 0.5 with eps = 0.1: the box reaches 0.65, so the rise is a (0.4225 - 0.25) / 2.
    for a in (1.0, 4.0):
        rise, here = a * (0.65**2 - 0.5**2) / 2, a * 0.125
        found = epsilon_sharpness(quadratic(a), torch.tensor([0.5]), epsilon=0.1)
        assert found == pytest.approx(100 * rise / (1 + here), rel=1e-4)


def test_filters_get_the_models_own_lengths():
    # Rows (3, 4) and (0, 2) have lengths 5 and 2; the directions' rows (1, 0) and (0, -10) become (5, 0) and (0, -2).
    weights, direction = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, -10.0]])
    assert filter_normalised(direction, weights).tolist() == [[5.0, 0.0], [0.0, -2.0]]
    assert filter_normalised(torch.ones(3), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    kernel = torch.full((2, 3, 1, 1), 2.0)
    assert filter_normalised(torch.randn(2, 3, 1, 1, generator=torch.Generator().manual_seed(1)), kernel).flatten(
        1
    ).norm(dim=1).tolist() == pytest.approx([math.sqrt(12)] * 2)


def test_the_surface_is_the_loss_at_the_grid():
    d1, d2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = surface(quadratic(2.0, 4.0), torch.tensor([1.0, 0.0]), d1, d2, np.array([-1.0, 0.0, 1.0]))
    # Row i: w_1 = 1 + axis[i] in (0, 1, 2) gives w_1^2; column j: w_2 = axis[j] gives 2 w_2^2.
    assert found.tolist() == [[2.0, 0.0, 2.0], [3.0, 1.0, 3.0], [6.0, 4.0, 6.0]]


def test_a_point_is_the_networks_own_loss():
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        net.bias.zero_()
    point = Point(net, torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0]))
    # Scores (log 3, 0): the probability of class 0 is 3 / 4.
    assert float(point.loss(point.weights)) == pytest.approx(math.log(4 / 3))
    # Same seed, same direction; rows have length 1, the bias stands still.
    first, again, other = point.direction(1, 0), point.direction(1, 0), point.direction(1, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first[:4].reshape(2, 2).norm(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert first[4:].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_two_runs_on_the_same_axes(monkeypatch, tmp_path, capsys):
    tiny = [*SMALL, "engine.workers=1", "train.lr=0.1", "rounds=2"]
    for method in ("fedavg", "fedcross"):
        assert call(monkeypatch, tmp_path, *tiny, f"method={method}", f"hydra.run.dir={method}") == 0
    options = ["--out", "out", "--points", "3", "--examples", "50"]
    assert main(["fedavg", "fedcross", *options]) == 0
    found = json.loads((tmp_path / "out" / "landscape.json").read_text())
    assert found["axis"] == [-1.0, 0.0, 1.0]
    for run in found["runs"]:
        assert run["surface"][1][1] == pytest.approx(run["loss"])
        assert run["epsilon_sharpness"] > 0
    assert all((tmp_path / "out" / name).stat().st_size > 5000 for name in ("landscape.png", "diversity.png"))
    assert main(["fedavg", *options, "--points", "4"]) == 2
    (tmp_path / "fedavg" / "model.safetensors").unlink()
    assert main(["fedavg", *options]) == 2
    assert "Let the run finish" in capsys.readouterr().err
