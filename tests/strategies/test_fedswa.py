"""FedSWA and FedMoSWA: the falling learning rate, the longer global step, the server's averaged variate."""

import numpy as np

from fedcross.strategies.fedmoswa import FedMoSWA
from fedcross.strategies.fedswa import Falling, FedSWA, FedSWAParams
from tests.support.by_hand import LR, NAME, START, STEPS, local, near, played, slope
from tests.support.single import arrays, begun, feed

RATIO = 0.2


def rate(step):
    """Return .5 and, halfway, .5 (1 - .8/2) = .3."""
    return LR * (1 - (1 - RATIO) * step / STEPS)


def test_the_rate_by_hand():
    falling = Falling(FedSWAParams(ratio=0.1))
    assert [round(falling.rate(step, 3), 6) for step in range(3)] == [1.0, 0.7, 0.4]


def test_fedswa():
    w = START.copy()
    for _ in range(3):
        uploads = [local(w, lambda _, v, u=u: slope(u, v), rate) for u in range(2)]
        w = w + 1.5 * (sum(uploads) / 2 - w)
    method, kept, found = played("fedswa", ratio=RATIO, server_lr=1.5)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    assert kept == {}


def test_fedmoswa():
    w, c, own = START.copy(), np.zeros((2, 2)), [np.zeros((2, 2))] * 2
    for _ in range(3):
        uploads = [local(w, lambda _, v, u=u, d=c - own[u]: slope(u, v) + d, rate) for u in range(2)]
        own = [own[u] - c + (w - uploads[u]) / (rate(0) + rate(1)) for u in range(2)]
        c = c + 0.4 * (sum(own) / 2 - c)
        w = sum(uploads) / 2
    method, kept, found = played("fedmoswa", ratio=RATIO)
    near(found, uploads)
    near(method.global_model()[NAME], w)
    near(kept[1][NAME], own[1])
    near(method.total[NAME] / 2, c)


def test_the_variate_of_the_server_by_hand():
    """N = 4, two uploads with changes 1 and 3: c goes .5 of the way 2, so N c = 4."""
    method = begun(FedMoSWA, beta=0.5)
    method.sample(1, range(4))
    sent = {i: {"control": {"w": np.full(2, value, np.float32)}} for i, value in enumerate((1.0, 3.0))}
    feed(method, 1, arrays(2.0), arrays(4.0), extras=sent)
    assert method.total["w"].tolist() == [4, 4]
    method.sample(2, range(8))  # N grows to 8: c stays 1
    assert method.total["w"].tolist() == [8, 8]


def test_batch_statistics_go_the_longer_step_and_counters_the_mean():
    method = begun(FedSWA, server_lr=1.5)
    feed(method, 1, arrays(2.0, mean=2.0, count=2), arrays(4.0, mean=4.0, count=4))
    model = method.global_model()
    assert (model["w"].tolist(), model["mean"].tolist(), int(model["n"])) == ([4.5, 4.5], [4.5], 3)


def test_without_their_parts_they_are_fedavg_and_scaffold():
    near(played("fedswa", ratio=1.0)[2], played("fedavg", weighting="uniform")[2])
    near(played("fedmoswa", ratio=1.0, beta=1.0)[2], played("scaffold")[2])
