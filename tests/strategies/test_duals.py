"""FedSpeed, FedSMOO, FedLESAM-D and FedGMT: three rounds by the formulas, and what they become without their part."""

import numpy as np
import pytest
import torch

from fedcross.strategies.fedgmt import FedGMT, FedGMTParams, Trajectory
from fedcross.strategies.objective import Trained
from tests.support import visits as v
from tests.support.by_hand import DATA, NAME, START, local, near, played, slope, softmax, unit
from tests.support.single import arrays, begun, feed

A, RHO = 0.4, 0.3


def by_hand(visit, rounds=3):
    """Play FedDyn's rounds; ``visit(client, w, h)`` returns the trained weights. Returns w, h and uploads."""
    w, h = START.copy(), [np.zeros((2, 2))] * 2
    for _ in range(rounds):
        uploads = [visit(u, w, h[u]) for u in range(2)]
        h = [h[u] + uploads[u] - w for u in range(2)]
        w = sum(uploads) / 2 + sum(h) / 2
    return w, h, uploads


def test_fedspeed():
    def visit(u, w, h):
        return local(w, lambda _, v: slope(u, v + RHO * unit(slope(u, v))) + A * (v - w + h))

    w, h, uploads = by_hand(visit)
    method, kept, found = played("fedspeed", alpha=A, rho=RHO)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(kept[1][f"dual.{NAME}"], h[1])


def test_fedlesam():
    """The way goes uphill: from the model of this visit to that of the last one."""
    old = {}

    def visit(u, w, h):
        way, old[u] = RHO * unit(old.get(u, w) - w), w
        return local(w, lambda _, v: slope(u, v + way) + A * (v - w + h))

    w, _, uploads = by_hand(visit)
    method, kept, found = played("fedlesam", alpha=A, rho=RHO)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(kept[0][f"old.{NAME}"], old[0])


def test_fedsmoo():
    """With rho far below the gradient's norm, else mu_u changes its sign in every step and its mean is rounding."""
    rho, shared, own = 0.05, [np.zeros((2, 2))], [np.zeros((2, 2))] * 2

    def visit(u, w, h):
        if u == 0 and own[0].any():
            mean = (own[0] + own[1]) / 2
            shared[0] = rho * mean / (np.linalg.norm(mean) + 1e-7)

        def direction(_, v):
            s = rho * unit(slope(u, v) - own[u] - shared[0])
            own[u] = own[u] + s - shared[0]
            return slope(u, v + s) + A * (v - w + h)

        return local(w, direction)

    w, _, uploads = by_hand(visit)
    method, kept, found = played("fedsmoo", alpha=A, rho=rho)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(kept[1][f"own.{NAME}"], own[1])
    near(np.linalg.norm(method.perturbation[NAME]), rho / (1 + 1e-7 / np.linalg.norm((own[0] + own[1]) / 2)))


def test_fedgmt():
    """The gradient of ``tau^2 KL`` is tau times the difference of the softened predictions."""
    gamma, tau, decay = 0.7, 2.0, 0.6
    average, began = START.copy(), [START]

    def visit(u, w, h):
        nonlocal average
        if u == 0 and w is not began[0] and not np.array_equal(w, START):
            average = decay * average + (1 - decay) * w
        x = np.array(DATA[u][0][0])

        def direction(_, v):
            gap = softmax(v @ x / tau) - softmax(average @ x / tau)
            return slope(u, v) + gamma * tau * np.outer(gap, x) + A * h

        return local(w, direction)

    w, _, uploads = by_hand(visit)
    method, _, found = played("fedgmt", alpha=A, gamma=gamma, tau=tau, decay=decay)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(method.average[NAME], decay * average + (1 - decay) * w)


def test_the_average_of_fedgmt_takes_in_batch_statistics():
    method = begun(FedGMT, decay=0.5)
    feed(method, 1, arrays(2.0, mean=4.0), arrays(4.0, mean=8.0))
    assert method.average["mean"].tolist() == [3.0]
    assert method.average["w"].tolist() == [3.0, 3.0]  # G = mean 3 + drift 3


def test_under_another_server_the_client_of_fedgmt_averages_what_it_receives():
    """Two rounds between its visits: E = .5^2 E + (1 - .5^2) w, from 1 and 3: 2.5."""
    objective, net = Trajectory(FedGMTParams(decay=0.5)), v.small_net()
    first, second = (v.visit(net, 0, 4, round=number) for number in (3, 5))
    for visit, value in ((first, 1.0), (second, 3.0)):
        visit.params = {name: torch.full_like(p, value) for name, p in visit.params.items()}
    prepared = objective.prepare(first)
    assert float(prepared["own"].mean()) == 1.0
    flat = torch.full_like(net.flat, 1.5)
    second.state = objective.finish(first, Trained({}, {}, flat, None, 1, 0.0), prepared).state
    prepared = objective.prepare(second)
    assert float(prepared["own"].min()) == float(prepared["own"].max()) == 2.5
    assert float(prepared["dual"].max()) == 0.5


@pytest.mark.parametrize("name", ["fedspeed", "fedlesam", "fedsmoo"])
def test_without_a_way_they_are_feddyn(name):
    _, _, found = played(name, alpha=A, rho=0.0)
    _, _, expected = played("feddyn", alpha=A)
    near(found, expected)
    assert abs(played(name, alpha=A, rho=RHO)[2][0] - expected[0]).max() > 1e-3


def test_fedgmt_without_its_parts_trains_as_fedavg_does():
    near(played("fedgmt", rounds=1, alpha=0, gamma=0)[2], played("fedavg", rounds=1)[2])
