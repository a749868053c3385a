"""FedNova: normalised updates by hand, and the worth of steps as the authors' optimiser accumulates it."""

import numpy as np
import pytest

from fedcross.conf.schema import Train
from fedcross.strategies.fednova import FedNova
from tests.support.bench import play, two_layers
from tests.support.single import arrays, begun, feed


def took(*steps):
    return {i: {"steps": {"tau": np.array(tau)}} for i, tau in enumerate(steps)}


def test_two_clients_by_hand():
    """Shares 1/4 and 3/4, tau 2 and 6: sum p a = 5, d = (4/2, 12/6) = 2 and 2 up from 10: 10 + 5 * 2 = 20.

    FedAvg would be 10 + 1 + 9 = 20 as well only because d agree; with 14 and 16: d = 2, 1: 10 + 5 (.5 + .75) = 16.25.
    """
    method = begun(FedNova, initial=10.0)
    feed(method, 1, arrays(14.0), arrays(22.0), examples=[1, 3], extras=took(2, 6))
    assert method.global_model()["w"].tolist() == [20, 20]
    method = begun(FedNova, initial=10.0)
    metrics = feed(method, 1, arrays(14.0, 4.0, 8), arrays(16.0, 8.0, 4), examples=[1, 3], extras=took(2, 6))
    assert method.global_model()["w"].tolist() == [16.25, 16.25]
    assert metrics == {"effective_steps": 5.0}
    assert (float(method.global_model()["mean"][0]), int(method.global_model()["n"])) == (7.0, 5)


def test_the_worth_of_steps_is_the_authors():
    """Their optimiser's counter is ``c = rho c + 1`` in each step, and a_u the sum of the counters."""
    rho, worth = 0.9, []
    for tau in (3, 11):
        counter = total = 0.0
        for _ in range(tau):
            counter = rho * counter + 1
            total += counter
        worth.append(total)
    method = begun(FedNova, momentum=rho)
    metrics = feed(method, 1, arrays([1.0, 2.0]), arrays([-3.0, 5.0]), examples=[2, 3], extras=took(3, 11))
    tau_eff = 0.4 * worth[0] + 0.6 * worth[1]
    way = 0.4 * tau_eff / worth[0] * np.array([1.0, 2.0]) + 0.6 * tau_eff / worth[1] * np.array([-3.0, 5.0])
    assert method.global_model()["w"] == pytest.approx(way, rel=1e-6)
    assert metrics["effective_steps"] == pytest.approx(tau_eff)


def test_clients_report_their_steps():
    """Batches of 2: three examples make two steps an epoch, one makes one; three epochs: 6 and 3."""
    data = [([[1.0], [2.0], [-1.0]], [0, 1, 0]), ([[2.0]], [1])]
    local = Train(lr=0.5, epochs=3, batch=2)
    plain = play("fedavg", two_layers(None, [[0.1], [0.0]]), data, local=local)[2]
    method, _, uploads = play("fednova", two_layers(None, [[0.1], [0.0]]), data, local=local)
    start, a, b = (np.array(m) for m in ([[0.1], [0.0]], *(u["classifier.weight"] for u in uploads)))
    assert (a == plain[0]["classifier.weight"]).all()
    expected = start + (0.75 * 6 + 0.25 * 3) * (0.75 * (a - start) / 6 + 0.25 * (b - start) / 3)
    np.testing.assert_allclose(method.global_model()["classifier.weight"], expected, rtol=0, atol=1e-14)


def test_an_upload_with_absurd_steps_is_left_out():
    method = begun(FedNova, initial=10.0)
    for wrong in (0, -3, 10**7 + 1):
        feed(method, 1, arrays(14.0), arrays(99.0), extras=took(2, wrong))
        assert method.global_model()["w"].tolist() == [14, 14]
    assert feed(method, 2, arrays(99.0), extras=took(0)) == {}
    assert method.global_model()["w"].tolist() == [14, 14]


def test_a_lost_upload_leaves_the_sums_to_the_others():
    method = begun(FedNova, initial=0.0)
    feed(method, 1, arrays(4.0), arrays(6.0), extras=took(1, 3))
    assert method.global_model()["w"].tolist() == [6, 6]  # 2 (4/2 + 6/6)


def test_with_equal_steps_their_worth_is_reported_too():
    """Two steps with momentum .5 are worth (2 - .75) / .5."""
    method = begun(FedNova, initial=0.0, momentum=0.5)
    assert feed(method, 1, arrays(4.0), arrays(6.0), extras=took(2, 2)) == {"effective_steps": 2.5}
    assert method.global_model()["w"].tolist() == [5, 5]
