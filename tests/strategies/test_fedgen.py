import math

import numpy as np
import pytest
import torch

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedgen import TRAINED, FedGen
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Batch
from tests.support.bench import forgetful
from tests.support.by_hand import softmax
from tests.support.federation import run, same
from tests.support.game import Game
from tests.support.rivals import begin, linear, visit_of, work

SMALL = ("method=fedgen", "method.hidden=16", "method.noise=8", "method.generator_steps=3")


def tiny(module=None, **own):
    """Return a game of FedGen with a tiny generator, and the network."""
    module = module or linear([[0.0], [0.0]], [0.0, 0.0])
    values = {"noise": 2, "hidden": 3, "batch": 4, "generator_batch": 4, **own}
    return begin(FedGen, module, clients_per_round=2, **values)


def train_generator(method, number, counts, models):
    return method.method.train_generator(method.state, method.round(number), np.array(counts), models)


def constant(method, z):
    """Let the generator give `z` for every noise and label."""
    for name in TRAINED:
        method.generator[name] = np.full_like(method.generator[name], z if name == "latent.bias" else 0.0)


def test_two_server_steps_by_hand():
    """Two clients, embedding of one number; a generator whose first layer is 0 gives z = latent.bias for every noise.

    Only label 0 is held, by the clients in shares 1/4 and 3/4, so with heads u_k z against 0 and s = sigmoid:
    L(z) = sum_k a_k ln(1 + e^{-u_k z}), L'(z) = -sum_k a_k u_k s(-u_k z). The hidden units are 0 and their ReLU blocks
    all other gradients; equal embeddings have no diversity gradient. Adam with m = .1 g, v = .001 g^2 at first:
    z1 = z0 - lr g0/(|g0| + eps), then m = .09 g0 + .1 g1 over 1 - .9^2, v = .000999 g0^2 + .001 g1^2 over 1 - .999^2.
    """
    method, _ = tiny(generator_steps=2, generator_lr=0.1, generator_weight_decay=0.0)
    z, lr, u, a = 0.3, 0.1, (1.0, -0.5), (0.25, 0.75)
    constant(method, z)

    def slope(z):
        return -sum(a_k * u_k / (1 + math.exp(u_k * z)) for a_k, u_k in zip(a, u))

    g0 = slope(z)
    z1 = z - lr * g0 / (abs(g0) + 1e-8)
    g1 = slope(z1)
    m = (0.09 * g0 + 0.1 * g1) / (1 - 0.9**2)
    v = (0.000999 * g0**2 + 0.001 * g1**2) / (1 - 0.999**2)
    heads = [{"classifier.weight": np.array([[u_k], [0.0]]), "classifier.bias": np.zeros(2)} for u_k in u]
    loss = train_generator(method, 1, np.array([[1, 0], [3, 0]]), heads)
    assert method.generator["latent.bias"].item() == pytest.approx(z1 - lr * m / (math.sqrt(v) + 1e-8), rel=1e-5)
    apart, _ = tiny(generator_steps=1, generator_lr=0.1, generator_weight_decay=0.0)
    constant(apart, z)
    for number in (1, 2):  # Adam's state outlives the round
        train_generator(apart, number, np.array([[1, 0], [3, 0]]), heads)
    assert apart.generator["latent.bias"].item() == pytest.approx(method.generator["latent.bias"].item(), rel=1e-6)
    assert loss == pytest.approx(sum(a_k * math.log1p(math.exp(-u_k * z1)) for a_k, u_k in zip(a, u)) + 1, rel=1e-5)
    assert float(np.abs(method.generator["latent.weight"]).max()) == 0
    assert method.adam_steps == 2


def test_two_clients_two_steps_by_hand():
    """Linear model V [x; 1]; the generator gives z0 = 2 for every label; only label 0 is known, so y' = 0.

    Per step dL/dV = mean (p(x) - e_y) [x; 1] + beta mean known_y (p(x) - q) [x; 1] + alpha (p(z0) - e_0) [z0; 1], with
    q = p(z0) held fixed. Client 0 has (1, 0), (-1, 1): the KL counts for the first example alone. Client 1 has (3, 0).
    """
    alpha, beta, lr, z0 = 0.7, 0.4, 0.5, 2.0
    method, net = tiny(linear([[0.2], [-0.1]], [0.0, 0.3]), alpha=alpha, beta=beta, generator_steps=1)
    constant(method, z0)
    method.known = np.array([1, 0], np.uint8)
    data = [([[1.0], [-1.0]], [0, 1]), ([[3.0]], [0])]

    def by_hand(x, y):
        v = np.array([[0.2, 0.0], [-0.1, 0.3]])
        eye = np.eye(2)
        for _ in range(2):
            seen, own = np.array([z0, 1.0]), [np.array([row[0], 1.0]) for row in x]
            q = softmax(v @ seen)
            g = alpha * np.outer(q - eye[0], seen)
            for point, label in zip(own, y):
                p = softmax(v @ point)
                g += np.outer(p - eye[label], point) / len(x)
                g += beta * (label == 0) * np.outer(p - q, point) / len(x)
            v = v - lr * g
        return v

    current = Round(2, 0, (0, 1), 0)
    uploads = [work(method, net, payload, *data[payload.client], 2) for payload in method.dispatch(current)]
    expected = [by_hand(*data[client]) for client in (0, 1)]
    for upload, v in zip(uploads, expected):
        np.testing.assert_allclose(upload.arrays["classifier.weight"][:, 0], v[:, 0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(upload.arrays["classifier.bias"], v[:, 1], rtol=0, atol=1e-12)
    assert [u.extras["labels"]["counts"].tolist() for u in uploads] == [[1, 1], [1, 0]]
    method.aggregate(current, uploads)
    mean = (2 * expected[0] + expected[1]) / 3
    np.testing.assert_allclose(method.global_model()["classifier.weight"][:, 0], mean[:, 0], rtol=0, atol=1e-12)
    assert method.known.tolist() == [1, 1]


def test_coefficients_fade_to_1e_4_and_no_further():
    method, net = tiny(linear([[0.0], [0.0]], [0.0, 0.0]), alpha=10.0, beta=5e-5, decay=0.5)
    method.known[:] = 1
    payload = method.dispatch(Round(1, 0, (0, 1), 0))[0]
    objective = method.method.objective()
    seen = [objective.prepare(visit_of(net, payload, [[1.0]], [0], number)) for number in (1, 3, 60)]
    assert [float(e["alpha"]) for e in seen] == pytest.approx([10, 2.5, 1e-4])
    assert [float(e["beta"]) for e in seen] == pytest.approx([5e-5, 5e-5, 5e-5])


@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_under_vmap_each_client_has_the_loss_and_gradient_it_has_alone(law):
    """Two clients with three examples each, padded to five under vmap, float64."""
    method, net = tiny(linear([[0.2, 1.0], [-0.1, 0.5]], [0.0, 0.3]), alpha=0.7, beta=0.4, noise_law=law)
    method.known[:] = 1
    objective = method.method.objective()
    clients = []
    for client, payload in enumerate(method.dispatch(Round(3, 0, (0, 1), 0))):
        x = np.arange(6.0).reshape(3, 2) * (client + 1) / 5
        visit = visit_of(net, payload, x, [0, 1, client], 3)
        clients.append(({n: p + 0.1 * client for n, p in visit.params.items()}, visit, objective.prepare(visit)))

    def loss(params, x, y, prepared, mask=None):
        return objective.loss(net, params, {}, Batch(x, y, mask, step=4), prepared)

    slopes = torch.func.grad_and_value(loss)
    alone = [slopes(params, visit.x, visit.y, prepared) for params, visit, prepared in clients]
    padding = torch.full((2, 2), 7.0, dtype=torch.float64)

    def stack(trees):
        first = trees[0]
        return {n: stack([t[n] for t in trees]) for n in first} if isinstance(first, dict) else torch.stack(trees)

    gradients, values = torch.func.vmap(slopes)(
        stack([params for params, _, _ in clients]),
        torch.stack([torch.cat([visit.x, padding]) for _, visit, _ in clients]),
        torch.stack([torch.cat([visit.y, visit.y.new_zeros(2)]) for _, visit, _ in clients]),
        stack([prepared for _, _, prepared in clients]),
        (torch.arange(5) < 3).expand(2, 5),
    )
    for i, (gradient, value) in enumerate(alone):
        torch.testing.assert_close(values[i], value, rtol=1e-12, atol=0)
        for name, slope in gradient.items():
            torch.testing.assert_close(gradients[name][i], slope, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_moments_matter_and_can_be_forgotten(tmp_path):
    kept = run(tmp_path / "a", *SMALL).driver.state
    fresh = run(tmp_path / "b", *SMALL, "method.fresh_adam=true").driver.state
    assert kept.adam_steps == 9
    assert fresh.adam_steps == 3
    assert not same(kept.generator, fresh.generator)
    assert sorted(kept.moments) == sorted(f"{m}.{n}" for m in ("first", "second") for n in TRAINED)


@pytest.mark.slow
def test_a_round_without_uploads_leaves_model_and_generator_alone(tmp_path):
    lossy = run(tmp_path / "a", *SMALL, "rounds=3", app=forgetful(lambda client, number: number == 3))
    short = run(tmp_path / "b", *SMALL, "rounds=2")
    before, after = short.driver.checkpoint(), lossy.driver.checkpoint()
    assert same(dict(sorted(before.arrays.items())), dict(sorted(after.arrays.items())))
    assert before.values["method"] == after.values["method"]


def test_labels_of_lost_clients_do_not_count():
    """Client 0 holds label 0, client 1 holds label 1; only client 0 arrives."""
    method, _ = tiny(linear([[0.1], [0.0]], [0.0, 0.0]), generator_steps=1)
    method.aggregate(Round(1, 0, (0, 1), 0), [claim(method, [5, 0])])
    assert method.known.tolist() == [1, 0]


def test_counts_are_scaled_to_the_examples_and_negative_ones_have_no_say(monkeypatch):
    method, _ = tiny(linear([[0.1], [0.0]], [0.0, 0.0]))
    seen = []
    monkeypatch.setattr(
        method.method, "train_generator", lambda state, current, counts, models: seen.append(counts) or 0.0
    )
    method.aggregate(Round(1, 0, (0, 1), 0), [claim(method, [2**62, -3])])
    assert seen == []
    method.aggregate(Round(2, 0, (0, 1), 0), [claim(method, [5, 5]), claim(method, [3, 2])])
    assert seen[0].tolist() == [[2.5, 2.5], [3, 2]]


def test_without_any_count_there_is_no_generator_to_send():
    method, _ = tiny(linear([[0.1], [0.0]], [0.0, 0.0]))
    assert method.aggregate(Round(1, 0, (0,), 0), [claim(method, [0, 0])]) == {}
    assert method.dispatch(Round(2, 0, (0,), 0))[0].extras == {}


def claim(method, counts):
    arrays = {name: array.copy() for name, array in method.global_model().items()}
    return Upload(0, 0, arrays, {"labels": {"counts": np.array(counts, np.int64)}}, 5, {})


def test_the_official_preset_has_the_published_generator():
    params = load(["method=fedgen_official"]).method
    assert (params.alpha, params.beta, params.decay, params.batch) == (10.0, 10.0, 0.98, 32)
    assert (params.hidden, params.noise, params.noise_law) == (256, 32, "uniform")
    assert (params.generator_batch, params.generator_lr_decay) == (32, 0.98)


def test_a_model_without_a_linear_head_is_refused():
    with pytest.raises(ConfigError, match=r"classifier\.weight"):
        Game(FedGen, {"w": np.zeros(3, np.float32)})
