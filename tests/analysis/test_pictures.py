"""The analyses of models, end to end on tiny real runs, and their arithmetic by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedcross.analysis import cka, forgetting, tsne
from fedcross.analysis.landscape import Point, epsilon_sharpness, filter_normalised, largest_eigenvalue, surface
from fedcross.analysis.partition_plot import client_table, setup, sizes
from fedcross.server.launch import launch
from tests.support.command import subcommand

main = subcommand("analyse")
SETTINGS = [
    "task=digits", "task.limit=150", "task.limit_test=60", "partition.clients=3", "clients_per_round=3",
    "partition.min_size=5", "train.epochs=1", "train.batch=32", "logger=none", "rounds=2", "engine.workers=1",
]  # fmt: skip


class Small(nn.Module):
    """A convolution, a linear layer to the embedding, a classifier."""

    def __init__(self, classes):
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU()]
        self.features, self.classifier = nn.Sequential(*layers), nn.Linear(8, classes)

    def forward(self, x):
        return self.classifier(self.features(x))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_cache):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_STATE", str(folder / "states"))
        patch.setenv("FEDCROSS_CACHE", str(digits_cache))
        return {
            "fedct": launch(
                [*SETTINGS, "method=fedct", f"model={__name__}:Small", "snapshots.rounds=[1,2]"], folder / "fedct"
            ),
            "fedavg": launch([*SETTINGS, "method=fedavg", "snapshots.rounds=[2]"], folder / "fedavg"),
            "fedcross": launch([*SETTINGS, "method=fedcross"], folder / "fedcross"),
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cka", "tsne", "forgetting", "gradcam"])
def test_every_analysis_writes_its_picture(runs, tmp_path, capsys, kind):
    command = [str(runs["fedct"]), kind, "--out", str(tmp_path), "--examples", "40", "--rounds", "2", "--slots", "1"]
    assert main([*command, "--images", "0", "3"]) == 0
    assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    assert all(line.startswith(str(tmp_path)) for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_surfaces_and_newcomers_of_two_runs(runs, tmp_path):
    both = [str(runs["fedavg"]), str(runs["fedcross"])]
    assert main([*both, "landscape", "--points", "3", "--examples", "50", "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "landscape.csv")
    assert (table["epsilon_sharpness"] > 0).all()
    assert (tmp_path / "diversity.png").exists()
    assert main([*both, "landscape", "--points", "4", "--out", str(tmp_path)]) == 2
    assert main([*both, "onboard", "--epochs", "3", "--out", str(tmp_path)]) == 0
    curves = pd.read_csv(tmp_path / "onboard.csv").groupby("run")["accuracy"]
    assert (curves.size() == 4).all()


@pytest.mark.slow
def test_what_is_missing_is_named(runs, tmp_path, capsys):
    for line, words in (
        ([runs["fedcross"], "cka"], "no snapshots"),
        ([runs["fedct"], "cka", "--rounds", "7"], "no snapshot of round [7]"),
        ([runs["fedavg"], "forgetting"], "cross-training"),
        ([runs["fedavg"], "gradcam"], "no convolution"),
        ([runs["fedct"], "gradcam", "--images", "999"], "images 0 to 59"),
        ([runs["fedct"], runs["fedavg"], "cka"], "one run"),
        ([tmp_path, "cka"], "config.yaml"),
    ):
        assert main([*map(str, line), "--out", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_cka_is_one_under_rotation_and_scale_and_zero_for_orthogonal_representations():
    x = np.random.default_rng(1).standard_normal((6, 3))
    rotation = np.linalg.qr(np.random.default_rng(2).standard_normal((3, 3)))[0]
    grams = [cka.gram(x), cka.gram(5 * x @ rotation)]
    assert cka.similarities(grams[:1], grams)[0].tolist() == pytest.approx([1.0, 1.0])
    one, other = cka.gram(np.array([1.0, -1, 0, 0])[:, None]), cka.gram(np.array([0, 0, 1.0, -1])[:, None])
    assert cka.similarities([one], [other])[0, 0] == pytest.approx(0)
    assert cka.between(np.array([[1, 0.2, 0.4], [0.2, 1, 0.6], [0.4, 0.6, 1]])) == pytest.approx(0.4)


def test_forgetting_by_hand():
    found = pd.DataFrame(
        {"before": [0.8, 0.1, 0.5], "after": [0.2, 0.7, 0.4], "home": [True, False, True], "host": [False, True, True]}
    )
    means = forgetting.summary(found)
    assert [means[name] for name in ("home only", "host only", "both")] == pytest.approx([-0.6, 0.6, -0.1])
    assert math.isnan(means["neither"])


@pytest.mark.slow
def test_neighbours_of_two_clusters_are_of_their_own_class():
    points = np.concatenate([np.zeros((5, 2)), np.ones((5, 2))]) + np.arange(10)[:, None] * 1e-3
    assert tsne.neighbours(points, np.repeat([0, 1], 5), count=4) == 1.0


def quadratic(*diagonal):
    return lambda w: 0.5 * (torch.tensor(diagonal) * w**2).sum()


def test_sharpness_of_quadratic_losses():
    """The Hessian is diagonal; in the box of 0.001 (|0| + 1) the loss 0.5 w^2 is at most 0.5e-6, in percent 0.5e-4."""
    loss, point = quadratic(2.0, -7.0, 3.0), torch.tensor([1.0, 1.0, 1.0])
    assert largest_eigenvalue(loss, point, torch.tensor([0.3, 0.5, 0.7])) == pytest.approx(3.0, rel=1e-3)
    linear = epsilon_sharpness(lambda w: w.sum(), torch.zeros(2))
    assert linear == pytest.approx(100 * 2e-3)


def test_filters_get_the_models_own_lengths():
    # Rows (3, 4) and (0, 2) have lengths 5 and 2; the directions' rows (1, 0) and (0, -10) become (5, 0) and (0, -2).
    weights, direction = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, -10.0]])
    assert filter_normalised(direction, weights).tolist() == [[5.0, 0.0], [0.0, -2.0]]
    assert filter_normalised(torch.ones(3), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


def test_the_surface_is_the_loss_at_the_grid():
    d1, d2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = surface(quadratic(2.0, 4.0), torch.tensor([1.0, 0.0]), d1, d2, np.array([-1.0, 0.0, 1.0]))
    # Row i: w_1 = 1 + axis[i] in (0, 1, 2) gives w_1^2; column j: w_2 = axis[j] gives 2 w_2^2.
    assert found.tolist() == [[2.0, 0.0, 2.0], [3.0, 1.0, 3.0], [6.0, 4.0, 6.0]]


def test_a_point_is_the_networks_own_loss():
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.eye(2))
        net.bias.zero_()
    point = Point(net, torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0]))
    # Scores (log 3, 0): the probability of class 0 is 3 / 4.
    assert float(point.loss(point.weights)) == pytest.approx(math.log(4 / 3))
    assert torch.equal(point.direction(1, 0), point.direction(1, 0))
    assert point.direction(1, 0)[:4].reshape(2, 2).norm(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_a_partition_counts_every_example_once(tmp_path, capsys):
    chosen = setup(["task=digits", "partition=dirichlet", "partition.clients=4"])
    counts = chosen.counts(1)
    assert counts.to_numpy().sum() == len(chosen.task.train.y)
    assert client_table(counts)["examples"].astype(int).tolist() == counts.sum(axis=1).tolist()
    assert sizes(counts)["smallest"] <= sizes(counts)["largest"]
    show = subcommand("partition")
    assert show(["task=digits", "--markdown", "--plot", str(tmp_path / "p.png")]) == 0
    assert "| client |" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert show(["task=digits", "--plot", str(tmp_path / "p.doc")]) == 2
    assert show(["task=digits", "--seeds", "2"]) == 0
