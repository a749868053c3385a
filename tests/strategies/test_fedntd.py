import math

import numpy as np
import pytest
import torch

from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.fedntd import FedNTD, NotTrue
from fedcross.strategies.objective import Batch
from fedcross.strategies.parts.losses import divergence
from fedcross.tasks.models._split import Split
from tests.support.bench import open_visit, play, two_layers


def test_two_steps_by_hand():
    """Three classes, x = 1, so the logits are the weights w; both clients start at w = G = (0, 0, ln 2).

    Cross-entropy: gradient p - e_y. Distillation over the other labels, with q = softmax(w / tau) there: the derivative
    of KL(q_G || q) is (q - q_G) / tau, so beta tau^2 KL adds beta tau (q - q_G), and nothing for y.
    Step 1: q = q_G, so only p - e_y with p = (1/4, 1/4, 1/2). Step 2: both terms.
    """
    lr, beta, tau = 0.5, 0.8, 2.0
    start = np.array([0.0, 0.0, math.log(2)])
    expected = []
    for y, others in ((0, [1, 2]), (2, [0, 1])):
        w1 = start - lr * (np.array([0.25, 0.25, 0.5]) - np.eye(3)[y])
        p = np.exp(w1) / np.exp(w1).sum()
        gradient = p - np.eye(3)[y]
        q = np.exp(w1[others] / tau) / np.exp(w1[others] / tau).sum()
        teacher = np.exp(start[others] / tau) / np.exp(start[others] / tau).sum()
        gradient[others] += beta * tau * (q - teacher)
        expected.append(w1 - lr * gradient)
    data = [([[1.0]], [0]), ([[1.0]], [2])]
    method, _, uploads = play("fedntd", two_layers(None, start[:, None]), data, beta=beta, tau=tau)
    assert [u["classifier.weight"][:, 0] for u in uploads] == [pytest.approx(w, abs=1e-15) for w in expected]
    assert method.global_model()["classifier.weight"][:, 0] == pytest.approx((expected[0] + expected[1]) / 2)


def test_divergence_by_hand():
    """Label 1 of 3: teacher (0, 9, ln 3) gives (1/4, 3/4), student (ln 2, -9, 0) gives (2/3, 1/3) to the others.

    KL = 1/4 ln(3/8) + 3/4 ln(9/4); what label 1 has itself does not count.
    """
    scores = torch.tensor([[math.log(2), -9.0, 0.0]], dtype=torch.float64)
    teacher = torch.tensor([[0.0, 9.0, math.log(3)]], dtype=torch.float64)
    expected = 0.25 * math.log(3 / 8) + 0.75 * math.log(9 / 4)
    assert divergence(scores[:, [0, 2]], teacher[:, [0, 2]]).item() == pytest.approx(expected, abs=1e-15)


def test_the_teacher_runs_in_evaluation_behaviour():
    """Batch normalisation of three features that are the logits; batch (0, 0, 0), (2, 4, 6), labels 0, tau 1, beta 1.

    The student normalises by the batch, mean (1, 2, 3) and deviation (1, 2, 3): (-1, -1, -1), (1, 1, 1): it gives the
    other labels 1 and 2 a half each, and cross-entropy ln 3. The teacher normalises by its running mean 0 and variance
    1 and keeps the input: a half each for the first example (KL 0); e^4 : e^6 for the second.
    """
    norm = torch.nn.BatchNorm1d(3, eps=1e-12, dtype=torch.float64)
    classifier = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(classifier.weight)
    net = ModuleNet(Split(norm, classifier), torch.device("cpu"))
    visit = open_visit(net, [[0.0, 0.0, 0.0], [2.0, 4.0, 6.0]], [0, 0])
    objective = NotTrue(FedNTD.Params())
    prepared = objective.prepare(visit)
    loss = objective.loss(net, net.params, net.buffers, Batch(visit.x, visit.y), prepared).item()
    q = np.exp([4, 6]) / np.exp([4, 6]).sum()
    assert loss == pytest.approx(math.log(3) + (q * np.log(q / 0.5)).sum() / 2, abs=1e-9)
    assert prepared["buffers"]["features.running_mean"].tolist() == [0, 0, 0]
    assert prepared["others"].tolist() == [[1, 2], [0, 2], [0, 1]]
