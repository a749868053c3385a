import numpy as np
import pytest
import torch

from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.moon import Contrast, Moon
from fedcross.strategies.objective import Batch
from fedcross.tasks.models._split import Split
from tests.support.bench import descent, forgetful, open_visit, play, states, two_layers, weights
from tests.support.federation import run, same, session

F0, V0 = np.array([[1.0, 0.5], [0.2, 1.0]]), np.array([[0.5, -0.3], [0.1, 0.4]])
#: One example per client: x, y.
DATA = [([[1.0, 0.5]], [0]), ([[-0.3, 2.0]], [1])]


def cosine(a, b):
    """Return cos(a, b) and its derivative with respect to a, (b/|b| - cos a/|a|) / |a|."""
    length = np.linalg.norm(a)
    value = a @ b / (length * np.linalg.norm(b))
    return value, (b / np.linalg.norm(b) - value * a / length) / length


def visit(f, v, x, y, previous, mu, tau, lr):
    """Return F and V after two steps on CE + mu log(1 + exp((s_P - s_G) / tau)), z = F x.

    The contrast's derivative is mu sigmoid((s_P - s_G) / tau) (ds_P/dz - ds_G/dz) / tau; it reaches F only.
    """
    anchor = f @ x
    for _ in range(2):
        z = f @ x
        dv, dz = descent(v, z, y)
        if previous is not None:
            (near, dnear), (far, dfar) = cosine(z, anchor), cosine(z, previous @ x)
            dz = dz + mu / (1 + np.exp((near - far) / tau)) * (dfar - dnear) / tau
        f, v = f - lr * np.outer(dz, x), v - lr * dv
    return f, v


def test_two_rounds_of_two_steps_by_hand():
    """Round 1 has no previous models: cross-entropy alone. In round 2 each client's own model of round 1 repels."""
    mu, tau, f, v = 2.0, 0.5, F0, V0
    kept = [None, None]
    for _ in range(2):
        moved = [visit(f, v, np.array(x[0]), y[0], previous, mu, tau, 0.5) for (x, y), previous in zip(DATA, kept)]
        kept = [own for own, _ in moved]
        f, v = (moved[0][0] + moved[1][0]) / 2, (moved[0][1] + moved[1][1]) / 2
    method, states_, uploads = play("moon", two_layers(F0, V0), DATA, rounds=2, mu=mu, tau=tau, projection=False)
    for i in (0, 1):
        assert uploads[i]["features.weight"] == pytest.approx(moved[i][0], abs=1e-13)
        assert uploads[i]["classifier.weight"] == pytest.approx(moved[i][1], abs=1e-13)
        assert same(states_[i], uploads[i])
    assert method.global_model()["features.weight"] == pytest.approx(f, abs=1e-13)


def test_the_head(tmp_path):
    """Digits MLP: features 64*64+64; head 64*512+512 + 512*256+256; classifier 256*10+10."""
    ready = session(tmp_path, "method=moon")
    model = ready.evaluator.network()
    assert weights(model) == 4160 + 33280 + 131328 + 2570
    assert model.embedding == 256
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    again = session(tmp_path, "method=moon")
    other = session(tmp_path, "method=moon", "seed=2")
    assert same(ready.driver.global_model(), again.driver.global_model())
    assert not same(ready.driver.global_model(), other.driver.global_model())


@pytest.mark.slow
def test_a_lost_client_keeps_its_previous_model(tmp_path):
    def lost(client, number):
        return client == 2 and number == 2

    all_six = ("method=moon", "method.hidden=8", "method.width=4", "clients_per_round=6")
    whole = run(tmp_path / "a", *all_six, "rounds=1")
    done = run(tmp_path / "b", *all_six, "rounds=2", app=forgetful(lost))
    assert done.driver.ledger.clients.accepted[2] == 1
    assert same(states(done, 2, 1), states(whole, 2, 1))
    assert not same(states(done, 2, 2), states(done, 2, 1))


def test_both_teachers_run_in_evaluation_behaviour():
    """Batch normalisation of two features, then a linear classifier; batch (1, 2), (3, 0), labels 0, 1, tau .5, mu 2.

    The model in training normalises by the batch: mean (2, 1), variance (1, 1), so z = (-1, 1), (1, -1), up to eps.
    G normalises by its own running mean (1, -1) and variance (4, 1/4): (0, 6), (1, 2). P has mean (0, 2), variance
    (1, 4): (1, 0), (3, -1). Cosines of z with G: 1/sqrt 2, -1/sqrt 10; with P: -1/sqrt 2, 4/sqrt 20. Logits are z.
    """
    norm = torch.nn.BatchNorm1d(2, eps=1e-12, dtype=torch.float64)
    norm.running_mean.copy_(torch.tensor([1.0, -1.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    classifier = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(classifier.weight)
    net = ModuleNet(Split(norm, classifier), torch.device("cpu"))
    kept = {name: array.copy() for name, array in net.read().items()}
    kept["features.running_mean"] = np.array([0.0, 2.0])
    kept["features.running_var"] = np.array([1.0, 4.0])
    visit = open_visit(net, [[1.0, 2.0], [3.0, 0.0]], [0, 1], state=kept)
    contrast = Contrast(Moon.Params(mu=2.0, tau=0.5, projection=False))
    prepared = contrast.prepare(visit)
    batch = Batch(visit.x, visit.y)
    loss = contrast.loss(net, net.params, net.buffers, batch, prepared).item()
    entropy = np.log1p(np.exp(2))  # -log e^-1 / (e^-1 + e), the same for both examples
    gaps = [(-1 / 2**0.5 - 1 / 2**0.5) / 0.5, (4 / 20**0.5 + 1 / 10**0.5) / 0.5]
    assert loss == pytest.approx(entropy + 2 * np.log1p(np.exp(gaps)).mean(), abs=1e-9)
    for part, mean in (("global", [1, -1]), ("previous", [0, 2])):
        assert prepared[part][1]["features.running_mean"].tolist() == mean
