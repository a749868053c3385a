"""FedVARP: the corrected mean by hand, and against plain averaging."""

import numpy as np

from fedcross.strategies.fedvarp import FedVARP
from fedcross.strategies.method import Upload
from tests.support.by_hand import NAME, near, played
from tests.support.single import arrays, begun


def send(method, number, **models):
    """Aggregate uploads of the clients ``c0``, ``c1``, ..."""
    uploads = [Upload(int(client[1:]), slot, arrays(w), {}, 1, {}) for slot, (client, w) in enumerate(models.items())]
    method.aggregate(method.round(number), uploads)
    return method.global_model()["w"].tolist()


def test_three_rounds_by_hand():
    """N = 4, from 0. Round 1: clients 0 and 1 move by 2 and 4, G = 3, y = 2, 4, 0, 0, mean 1.5.
    Round 2: clients 1 and 2 move by 1 and 3: mean of (1 - 4, 3 - 0) is 0, so G = 3 + 1.5; y = 2, 1, 3, 0, mean 1.5.
    Round 3: client 0 moves by .5: G = 4.5 + (.5 - 2) + 1.5.
    """
    method = begun(FedVARP)
    method.sample(1, range(4))
    assert send(method, 1, c0=2.0, c1=4.0) == [3, 3]
    method.sample(2, range(3))  # one is away, but N stays
    assert send(method, 2, c1=4.0, c2=6.0) == [4.5, 4.5]
    assert send(method, 3, c0=5.0) == [4.5, 4.5]
    assert {client: y["w"][0] for client, y in method.updates.items()} == {0: 0.5, 1: 1.0, 2: 3.0}
    assert method.total["w"].tolist() == [4.5, 4.5]


def test_with_all_clients_it_is_fedavg_with_a_uniform_mean():
    found, expected = (played(name, **own)[0] for name, own in (("fedvarp", {}), ("fedavg", {"weighting": "uniform"})))
    near(found.global_model()[NAME], expected.global_model()[NAME])
    assert np.isfinite(found.total[NAME]).all()


def test_the_server_learning_rate_scales_the_step():
    method = begun(FedVARP, server_lr=0.5)
    assert send(method, 1, c0=2.0, c1=4.0) == [1.5, 1.5]
