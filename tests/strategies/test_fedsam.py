"""FedSAM and FedASAM: the second gradient, the scale of the weights, the averaging of the last models."""

import numpy as np
import pytest
import torch

from fedcross.client.batched.trainer import train_batched
from fedcross.client.trainer import train
from fedcross.conf.schema import load
from fedcross.strategies.fedasam import AdaptiveSharpness, FedASAMParams
from fedcross.strategies.fedsam import FedSAM, FedSAMParams, Sharpness, Swa
from fedcross.strategies.method import Round
from fedcross.strategies.objective import Objective
from tests.support import visits as v
from tests.support.bench import descent, play, two_layers
from tests.support.federation import run, same
from tests.support.single import arrays, begun, feed

#: Client 0: x = (1, 2), label 0; client 1: x = (3, -1), label 1, twice.
DATA = [([[1.0, 2.0]], [0]), ([[3.0, -1.0]] * 2, [1, 1])]
START = np.array([[0.3, -0.2], [0.1, 0.4]])


def two_steps(x, y, way):
    """Return the weights after two steps of length .5 along the gradient at ``w + way(w, g)``."""
    w = START.copy()
    for _ in range(2):
        there = w + way(w, descent(w, np.array(x), y)[0])
        w = w - 0.5 * descent(there, np.array(x), y)[0]
    return w


@pytest.mark.parametrize(
    ("name", "own", "way"),
    [
        ("fedsam", {"rho": 0.3}, lambda w, g: 0.3 * g / np.linalg.norm(g)),
        (
            "fedasam",
            {"rho": 0.5, "eta": 0.1},
            lambda w, g: 0.5 * (abs(w) + 0.1) ** 2 * g / np.linalg.norm((abs(w) + 0.1) * g),
        ),
    ],
)
def test_two_steps_and_the_mean_by_the_formula(name, own, way):
    method, kept, uploads = play(name, two_layers(None, START.copy()), DATA, **own)
    expected = [two_steps(x[0], y[0], way) for x, y in DATA]
    for upload, w in zip(uploads, expected, strict=True):
        np.testing.assert_allclose(upload["classifier.weight"], w, rtol=0, atol=1e-12)
    mean = (expected[0] + 2 * expected[1]) / 3
    np.testing.assert_allclose(method.global_model()["classifier.weight"], mean, rtol=0, atol=1e-12)
    plain = play("fedavg", two_layers(None, START.copy()), DATA)[2]
    assert abs(plain[0]["classifier.weight"] - expected[0]).max() > 1e-3
    assert kept == {}


def test_biases_are_not_scaled():
    """g = (3, 4): the weight 1 has T = 1 + eta = 3, T g = (9, 4), T^2 g = (27, 4)."""
    objective = AdaptiveSharpness(FedASAMParams(rho=1.0, eta=2.0))
    prepared = {"scaled": torch.tensor([1.0, 0.0])}
    way = objective.ascent(torch.tensor([-1.0, 5.0]), torch.tensor([3.0, 4.0]), prepared)
    torch.testing.assert_close(way, torch.tensor([27.0, 4.0]) / 97**0.5)
    net = v.small_net(norm=True)
    scaled = objective.prepare(v.visit(net, 0, 3))["scaled"]
    assert float(scaled.sum()) == sum(p.numel() for n, p in net.params.items() if "weight" in n) < len(net.flat)


def test_a_gradient_of_zero_moves_nothing():
    zero = torch.zeros(3)
    assert (Sharpness(FedSAMParams()).ascent(zero, zero, {}) == 0).all()
    assert (AdaptiveSharpness(FedASAMParams()).ascent(zero, zero, {"scaled": zero + 1}) == 0).all()


class Unmoved(Sharpness):
    """Takes the second pass at w itself."""

    def ascent(self, flat, gradient, prepared):
        return torch.zeros_like(flat)


@pytest.mark.parametrize(
    "objective", [Sharpness(FedSAMParams(rho=0)), Unmoved(FedSAMParams())], ids=["rho 0", "second"]
)
def test_without_a_way_training_is_the_plain_one_to_the_bit(objective):
    """Also where batch normalisation and dropout would notice a second pass."""
    ends = []
    for one in (objective, Objective(FedSAMParams())):
        net = v.small_net(norm=True, dropout=True, dtype=torch.float32)
        visit = v.visit(net, 0, 9)
        v.enter(net, visit)
        done = train(net, one, visit, v.prepared(one, visit), v.settings())
        ends.append([done.flat.clone(), done.momentum.clone(), *(b.clone() for b in done.buffers.values()), done.loss])
    assert all((torch.as_tensor(a) == torch.as_tensor(b)).all() for a, b in zip(*ends, strict=True))


def test_the_statistics_are_those_of_the_first_pass():
    found = []
    for one in (Sharpness(FedSAMParams(rho=0.5)), Objective(FedSAMParams())):
        net = v.small_net(norm=True)
        visit = v.visit(net, 0, 9)
        v.enter(net, visit)
        done = train(net, one, visit, v.prepared(one, visit), v.settings(epochs=1, batch=9))
        found.append({name: buffer.clone() for name, buffer in done.buffers.items()})
    assert found[0].keys()
    assert all(torch.equal(buffer, found[1][name]) for name, buffer in found[0].items())


@pytest.mark.parametrize(
    "objective", [Sharpness(FedSAMParams(rho=0.2)), AdaptiveSharpness(FedASAMParams(rho=0.5))], ids=["sam", "asam"]
)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_both_trainers_agree(objective, norm):
    net = v.small_net(norm=norm, dropout=True)
    clients = [v.visit(net, i, n) for i, n in enumerate((12, 5, 7))]
    found = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(clip=0.5))
    for one, many in zip(clients, found, strict=True):
        v.enter(net, one)
        alone = train(net, objective, one, objective.prepare(one), v.settings(clip=0.5))
        torch.testing.assert_close(many.flat, alone.flat, rtol=0, atol=1e-10)
        torch.testing.assert_close(many.buffers, dict(alone.buffers), rtol=0, atol=1e-10)
        assert many.loss == pytest.approx(alone.loss, abs=1e-10)


@pytest.mark.slow
def test_rho_0_is_fedavg_to_the_bit(tmp_path):
    plain = run(tmp_path / "a", "method=fedavg").driver.global_model()
    for name in ("fedsam", "fedasam"):
        assert same(run(tmp_path / name, f"method={name}", "method.rho=0").driver.global_model(), plain)
    report = run(tmp_path / "c", "method=fedsam", "rounds=1").driver.report
    assert (report.bytes_down, report.bytes_up) == (3 * 4 * 4810, 3 * 4 * 4810)


# ---- averaging ---------------------------------------------------------------------------------------------------


def test_the_average_by_hand():
    """16 rounds, start .25, c = 2: averaging begins with i = 4, counted from 0; i = 6, 8, ... 14 join."""
    method = begun(FedSAM, rounds=16, swa={"start": 0.25, "cycle": 2})
    seen = []
    for number in range(1, 17):
        feed(method, number, arrays(float(number), mean=float(number), count=number))
        seen.append(float(method.global_model()["w"][0]))
        assert method.model["w"][0] == number
    # Numbers 7, 9, 11, 13, 15 join; before the first, the newest model is evaluated.
    assert seen == [1, 2, 3, 4, 5, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]
    assert method.global_model()["mean"] == 11
    assert method.global_model()["n"] == 11
    assert method.dispatch(Round(17, 0, (0,), 0))[0].arrays["w"][0] == 16


def test_the_cyclic_rate_by_hand():
    """10 rounds, from .5 on, c = 4, .1 to .02: i = 5 has t = (1 + 1)/4, i = 7 t = 1, i = 8 t = 1/4."""
    swa = Swa(start=0.5, cycle=4, lr=0.02)
    rates = [swa.rate(0.1, number, 10) for number in range(1, 11)]
    assert rates == pytest.approx([0.1] * 5 + [0.06, 0.04, 0.02, 0.08, 0.06])
    assert Swa(start=0.0, cycle=1, lr=0.02).rate(0.1, 3, 10) == 0.1
    visit = v.visit(v.small_net(), 0, 3, round=9)
    Sharpness(FedSAMParams(swa=Swa(start=0.5, cycle=4, lr=0.02))).prepare(visit)
    assert visit.lr == pytest.approx(0.08)


def test_without_swa_the_mean_of_the_uploads_is_evaluated():
    method = begun(FedSAM)
    feed(method, 8, arrays(2.0), arrays(5.0), examples=[1, 2])
    assert method.global_model()["w"].tolist() == [4, 4]


def test_the_configuration_takes_the_averaging():
    config = load(["method=fedasam", "method.swa={start: 0.5, cycle: 3, lr: 0.001}"])
    assert config.method.swa.cycle == 3
    assert load(["method=fedsam"]).method.swa is None


def test_a_longer_run_drops_an_average_that_is_not_of_its_own_end():
    """8 rounds from 3/4: the mean of rounds 7 and 8. Continued to 16, the newest is evaluated up to round 13, and then
    the mean of the rounds from 14 on. Continued to 9, where averaging begins after round 7 too, it goes on.
    """
    swa = {"start": 0.75, "cycle": 1}
    short = begun(FedSAM, rounds=8, swa=swa)
    for number in range(1, 9):
        feed(short, number, arrays(float(number)))
    assert short.global_model()["w"].tolist() == [8, 8]
    longer, little = begun(FedSAM, rounds=16, swa=swa), begun(FedSAM, rounds=9, swa=swa)
    for method in (longer, little):
        method.resume(short.checkpoint())
        evaluated = []
        for number in range(9, method.start.rounds + 1):
            feed(method, number, arrays(float(number)))
            evaluated.append(float(method.global_model()["w"][0]))
        method.seen = evaluated
    assert longer.seen == [9, 10, 11, 12, 13, 14, 14.5, 15]
    assert little.seen == [8.5]
