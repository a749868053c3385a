"""FedCM, MoFedSAM and FedWMSAM: three rounds by the formulas, and what they become without their part."""

import numpy as np
import pytest

from fedcross.strategies.fedcm import FedCM
from fedcross.strategies.fedwmsam import FedWMSAM, misaligned
from tests.support.by_hand import LR, NAME, START, STEPS, local, near, played, slope, unit
from tests.support.single import arrays, begun, feed

TRAIN = {"epochs": STEPS, "batch": 1000}


@pytest.mark.parametrize(("name", "own"), [("fedcm", {}), ("mofedsam", {"rho": 0.3})])
def test_the_momentum_is_the_last_global_step(name, own):
    a, rho, w, momentum = 0.6, own.get("rho", 0.0), START.copy(), np.zeros((2, 2))
    for _ in range(3):

        def direction(u, v, momentum=momentum):
            return a * slope(u, v + rho * unit(slope(u, v))) + (1 - a) * momentum

        uploads = [local(w, lambda _, v, u=u, d=direction: d(u, v)) for u in range(2)]
        momentum = (w - sum(uploads) / 2) / (STEPS * LR)
        w = sum(uploads) / 2
    method, kept, found = played(name, alpha=a, **own, **TRAIN)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    assert kept == {}


def test_steps_are_the_mean_of_the_effective_ones():
    """2 epochs of 1 and 3 batches: 2 and 6 steps; with momentum .5, 2 steps are worth (2 - .75) / .5 = 2.5."""
    for momentum, steps in ((0.0, 4.0), (0.5, (2.5 + (6 - (1 - 0.5**6)) / 0.5) / 2)):
        method = begun(FedCM, epochs=2, batch=4, momentum=momentum)
        feed(method, 1, arrays(1.0), arrays(3.0), examples=[4, 9])
        np.testing.assert_allclose(method.momentum["w"], [-2 / steps] * 2, rtol=1e-6)


def test_without_momentum_it_is_fedavg_with_a_uniform_mean():
    found, expected = played("fedcm", alpha=1.0, **TRAIN), played("fedavg", weighting="uniform")
    near(found[0].global_model()[NAME], expected[0].global_model()[NAME])
    near(played("mofedsam", rho=0.0, **TRAIN)[2], played("fedcm", **TRAIN)[2])


def test_fedwmsam():
    """e leads to where the momentum would have led from G; c and the weight a are the server's."""
    a, rho, w, momentum = 0.6, 0.3, START.copy(), np.zeros((2, 2))
    c, own = np.zeros((2, 2)), [np.zeros((2, 2))] * 2
    for _ in range(3):
        uploads, fresh = [], []
        for u in range(2):
            mine = momentum + a / (1 - a) * (c - own[u])

            def direction(step, v, u=u, mine=mine, w=w, a=a):
                way = rho * unit(w + step * mine - v)
                return a * slope(u, v + way) + (1 - a) * mine

            uploads.append(local(w, direction))
            fresh.append(own[u] - c + (w - uploads[u]) / (STEPS * LR))
        goal = np.mean([misaligned({"w": w}, {"w": upload}, {"w": momentum}) for upload in uploads])
        c = c + sum(fresh[u] - own[u] for u in range(2)) / 2
        own, a = fresh, a + 0.01 * (np.clip(goal, 0.1, 0.9) - a)
        momentum = (w - sum(uploads) / 2) / (STEPS * LR)
        w = sum(uploads) / 2
    method, kept, found = played("fedwmsam", alpha=0.6, rho=rho, **TRAIN)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(kept[0][NAME], own[0])
    near(method.mixing, a)


def test_the_weight_of_fedwmsam_by_hand():
    """Moves against D (upwards, D says down): cos -1, goal 2, cut to .9. Round 1 has no D: goal 0, raised to .1."""
    method = begun(FedWMSAM, alpha=0.5)
    zero = {"control": {"w": np.zeros(2, np.float32)}}
    feed(method, 1, arrays(-1.0), extras={0: zero})
    assert method.mixing == pytest.approx(0.5 + 0.01 * (0.1 - 0.5))
    feed(method, 2, arrays(1.0), extras={0: zero})
    assert method.mixing == pytest.approx(0.496 + 0.01 * (0.9 - 0.496))
