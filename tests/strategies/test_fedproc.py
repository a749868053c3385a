import numpy as np
import pytest
import torch

from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.fedproc import FedProc, Prototypical
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Trained
from fedcross.strategies.parts.single_model import SingleModel
from fedcross.tasks.models._split import Split
from tests.support.bench import descent, open_visit, play, two_layers
from tests.support.federation import run, same
from tests.support.game import Game

F0, V0 = np.array([[1.0, 0.5], [0.2, 1.0]]), np.array([[0.5, -0.3], [0.1, 0.4], [-0.2, 0.3]])
#: One example per client: x, y. Label 2 is nobody's.
DATA = [([[1.0, 0.5]], [0]), ([[-0.3, 2.0]], [1])]


def unit(a):
    return a / np.linalg.norm(a)


def visit(f, v, x, y, prototypes, share):
    """Return F and V after two steps of .5 on share CE + (1 - share) contrast, z = F x.

    With q the softmax over the labels of z/|z| . c_k, the contrast's derivative with respect to z/|z| is
    d = sum_k q_k c_k - c_y, and with respect to z the part of d across z, over |z|. It reaches F only.
    """
    for _ in range(2):
        z = f @ x
        dv, dz = descent(v, z, y)
        _, d = descent(prototypes, unit(z), y)
        across = (d - (d @ unit(z)) * unit(z)) / np.linalg.norm(z)
        f, v = f - 0.5 * np.outer(share * dz + (1 - share) * across, x), v - 0.5 * share * dv
    return f, v


def test_two_rounds_of_two_steps_by_hand():
    """Of R = 2 rounds the first has no prototypes: cross-entropy alone; the second (r = 1) has a share of 1/2.

    Each class has one example in one client, so its prototype is that client's embedding after training; label 2 has
    none and keeps zero, similarity 0.
    """
    zero = np.zeros((3, 2))
    xs = [np.array(x[0]) for x, _ in DATA]
    first = [visit(F0, V0, xs[i], i, zero, 1.0) for i in (0, 1)]
    f, v = (first[0][0] + first[1][0]) / 2, (first[0][1] + first[1][1]) / 2
    prototypes = np.stack([unit(first[0][0] @ xs[0]), unit(first[1][0] @ xs[1]), np.zeros(2)])
    second = [visit(f, v, xs[i], i, prototypes, 0.5) for i in (0, 1)]
    method, kept, uploads = play("fedproc", two_layers(F0, V0), DATA, rounds=2, projection=False)
    for i in (0, 1):
        assert uploads[i]["features.weight"] == pytest.approx(second[i][0], abs=1e-13)
        assert uploads[i]["classifier.weight"] == pytest.approx(second[i][1], abs=1e-13)
        assert method.prototypes[i] == pytest.approx(second[i][0] @ xs[i], abs=1e-13)
    assert method.prototypes[2].tolist() == [0, 0]
    assert kept == {}


def upload(sums, counts, examples):
    group = {"sum": np.array(sums, np.float32), "count": np.array(counts, np.int64)}
    return Upload(0, 0, {"classifier.weight": np.zeros((3, 2), np.float32)}, {"prototypes": group}, examples, {})


def begun():
    return Game(
        FedProc, {"classifier.weight": np.zeros((3, 2), np.float32)}, {"classifier.weight"}, clients_per_round=2
    )


def test_prototypes_are_weighted_by_counts_and_missing_classes_keep_theirs():
    """Class 0: ((2, 4) + (10, 2)) / (1 + 3) = (3, 1.5). Class 1 is held in round 1 only: (6, 8) / 2. Class 2 never."""
    method = begun()
    current = Round(1, 0, (0, 1), 0)
    method.aggregate(current, [upload([[1, 1], [6, 8], [0, 0]], [1, 2, 0], 3)])
    method.aggregate(
        current, [upload([[2, 4], [0, 0], [0, 0]], [1, 0, 0], 1), upload([[10, 2], [0, 0], [0, 0]], [3, 0, 0], 3)]
    )
    assert method.prototypes.tolist() == [[3, 1.5], [3, 4], [0, 0]]
    assert method.prototypes.dtype == np.float32


@pytest.mark.parametrize("counts", [[-1, 2, 0], [0, 0, 0]])
def test_counts_that_cannot_be_have_no_say(counts):
    method = begun()
    method.aggregate(Round(1, 0, (0,), 0), [upload([[9, 9], [9, 9], [0, 0]], counts, 1)])
    assert not method.prototypes.any()


def test_a_client_whose_examples_the_defence_caps_counts_as_many():
    """Of four examples two count: class 0 is ((8, 4) / 2 + (6, 6)) / (2 + 2)."""
    method, current = begun(), Round(1, 0, (0, 1), 0)
    capped, other = upload([[8, 4], [0, 0], [0, 0]], [4, 0, 0], 2), upload([[6, 6], [0, 0], [0, 0]], [2, 0, 0], 2)
    method.aggregate(current, [capped, other])
    assert method.prototypes.tolist() == [[2.5, 2], [0, 0], [0, 0]]


@pytest.mark.slow
def test_without_prototypes_it_is_fedavg_to_the_bit(tmp_path, monkeypatch):
    true = run(tmp_path / "c", "method=fedproc", "method.projection=false")
    monkeypatch.setattr(FedProc, "step", SingleModel.step)
    a = run(tmp_path / "a", "method=fedproc", "method.projection=false")
    b = run(tmp_path / "b", "method=fedavg")
    assert same(a.driver.global_model(), b.driver.global_model())
    assert not same(true.driver.global_model(), b.driver.global_model())


def test_prototypes_are_sums_over_all_examples_in_evaluation_behaviour(monkeypatch):
    """Batch normalisation with running mean (1, -1) and variance (4, 1/4), three examples in chunks of two.

    z = ((x_1 - 1) / 2, 2 (x_2 + 1)): (3, 0) gives (1, 2), (1, 1) gives (0, 4), (5, -1) gives (2, 0).
    """
    monkeypatch.setattr("fedcross.strategies.fedproc.CHUNK", 2)
    norm = torch.nn.BatchNorm1d(2, eps=1e-12, dtype=torch.float64)
    norm.running_mean.copy_(torch.tensor([1.0, -1.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    net = ModuleNet(Split(norm, torch.nn.Linear(2, 2, dtype=torch.float64)), torch.device("cpu"))
    extras = {"prototypes": {"mean": np.eye(2)}}
    visit = open_visit(net, [[3.0, 0.0], [1.0, 1.0], [5.0, -1.0]], [1, 0, 1], extras=extras)
    objective = Prototypical(FedProc.Params())
    trained = Trained(visit.params, visit.buffers, net.flat, None, 1, 0.0)
    sent = objective.finish(visit, trained, objective.prepare(visit)).extras["prototypes"]
    assert sent["sum"] == pytest.approx(np.array([[0, 4], [3, 2]]), abs=1e-9)
    assert sent["count"].tolist() == [1, 2]


@pytest.mark.parametrize(("number", "share"), [(1, 0), (2, 0.5), (3, 1), (9, 1)])
def test_the_share_of_cross_entropy_grows_to_1_and_stays(number, share):
    """A ramp of two rounds: 0, 1/2, and then cross-entropy alone."""
    net = ModuleNet(two_layers(None, np.eye(2)), torch.device("cpu"))
    visit = open_visit(net, [[1.0, 0.0]], [0], extras={"prototypes": {"mean": np.eye(2)}}, round=number, rounds=50)
    assert Prototypical(FedProc.Params(ramp=2)).prepare(visit)["share"] == share
