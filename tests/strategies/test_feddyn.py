"""FedDyn: two rounds by the formula, and against the bookkeeping of the authors' code."""

from dataclasses import replace

import numpy as np
import pytest

from fedcross.strategies.feddyn import Dual, FedDyn, FedDynParams
from fedcross.strategies.objective import Objective
from tests.support.bench import check_batched, descent, forgetful, play, states, two_layers
from tests.support.federation import run, same
from tests.support.single import arrays, begun, feed

#: Client 0: x = (1, 2), label 0; client 1: x = (3, -1), label 1, twice.
DATA = [([[1.0, 2.0]], [0]), ([[3.0, -1.0]] * 2, [1, 1])]
START = np.array([[0.3, -0.2], [0.1, 0.4]])


def test_three_rounds_are_the_papers_and_the_authors_bookkeeping():
    """The paper keeps g_u and h, the authors' code -g_u/a for each client and the mean of these: one result."""
    a, lr = 0.4, 0.5
    w, g, h = START.copy(), [np.zeros((2, 2))] * 2, np.zeros((2, 2))
    kept = [np.zeros((2, 2))] * 2  # the code's list
    for _ in range(3):
        uploads = []
        for u, (x, y) in enumerate(DATA):
            own = w.copy()
            for _ in range(2):
                slope = descent(own, np.array(x[0]), y[0])[0]
                theirs = slope + a * own + a * (-w + kept[u])  # decay a, and the gradient of a <w, -w_t + kept>
                assert theirs == pytest.approx(slope - g[u] + a * (own - w), abs=1e-12)
                own = own - lr * theirs
            uploads.append(own)
        g = [g[u] - a * (uploads[u] - w) for u in range(2)]
        h = h - a / 2 * sum(own - w for own in uploads)
        kept = [kept[u] + uploads[u] - w for u in range(2)]
        w = sum(uploads) / 2 - h / a
        assert w == pytest.approx(sum(uploads) / 2 + sum(kept) / 2, abs=1e-12)
    method, states_, found = play("feddyn", two_layers(None, START.copy()), DATA, rounds=3, alpha=a)
    for u in range(2):
        np.testing.assert_allclose(found[u]["classifier.weight"], uploads[u], rtol=0, atol=1e-12)
        np.testing.assert_allclose(states_[u]["dual.classifier.weight"], -g[u] / a, rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.global_model()["classifier.weight"], sum(uploads) / 2, rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.model["classifier.weight"], w, rtol=0, atol=1e-12)
    assert abs(h).max() > 0.01


def test_the_server_by_hand():
    """N = 4. From 1, uploads 2 and 4: drifts 1 + 3 = 4, mean 3, w = 3 + 4/4 = 4. Then 6 and 4: drift 4 + 2, w = 6.5."""
    method = begun(FedDyn, initial=1.0, global_model="server")
    method.sample(1, range(4))
    method.sample(2, range(2))
    feed(method, 1, arrays(2.0, mean=1.0, count=2), arrays(4.0, mean=2.0, count=5), examples=[1, 9])
    assert method.global_model()["w"].tolist() == [4, 4]
    assert (float(method.model["mean"][0]), int(method.model["n"])) == (1.5, 3)
    feed(method, 2, arrays(6.0), arrays(4.0))
    assert method.global_model()["w"].tolist() == [6.5, 6.5]
    assert method.mean["w"].tolist() == [5, 5]


def test_the_server_adds_the_moves_whatever_alpha_is():
    for alpha in (0.0, 0.5):
        method = begun(FedDyn, initial=1.0, alpha=alpha, global_model="server")
        feed(method, 1, arrays(2.0), arrays(4.0))
        assert method.global_model()["w"].tolist() == [5, 5]


def test_the_mean_of_the_uploads_may_be_by_examples():
    method = begun(FedDyn, initial=1.0, weighting="examples")
    feed(method, 1, arrays(2.0), arrays(4.0), examples=[3, 1])
    assert method.global_model()["w"].tolist() == [2.5, 2.5]
    assert method.model["w"].tolist() == [4.5, 4.5]


@pytest.mark.slow
def test_without_its_terms_and_drifts_it_is_fedavg_to_the_bit(tmp_path, monkeypatch):
    true = run(tmp_path / "a", "method=feddyn").driver.global_model()
    plain = run(tmp_path / "b", "method=fedavg", "method.weighting=uniform").driver.global_model()
    monkeypatch.setattr(FedDyn, "Objective", Objective)
    real = FedDyn.init
    monkeypatch.setattr(FedDyn, "init", lambda self, start: real(self, replace(start, parameters=())))
    bare = run(tmp_path / "c", "method=feddyn").driver.global_model()
    assert same(bare, plain)
    assert not same(true, plain)


@pytest.mark.slow
def test_a_lost_client_keeps_its_term(tmp_path):
    """All six are drawn; the work of client 2 is lost in round 2, after it had saved its new g."""

    def lost(client, number):
        return client == 2 and number == 2

    done = run(tmp_path, "method=feddyn", "clients_per_round=6", "rounds=2", app=forgetful(lost))
    assert done.driver.ledger.clients.accepted == {0: 2, 1: 2, 2: 1, 3: 2, 4: 2, 5: 2}
    kept = [states(done, client, visit) for client, visit in done.driver.ledger.clients.accepted.items()]
    for name, total in done.driver.state.duals.items():
        np.testing.assert_allclose(total, np.sum([k[f"dual.{name}"] for k in kept], axis=0), rtol=0, atol=1e-6)
    report = done.driver.report
    assert (report.bytes_down, report.bytes_up) == (6 * 4 * 4810, 5 * 4 * 4810)


def test_clients_batch():
    names = {"features.0.weight": (6, 4), "features.0.bias": (6,), "classifier.weight": (3, 6), "classifier.bias": (3,)}
    own = {f"dual.{name}": np.full(shape, 0.5) for name, shape in names.items()}
    check_batched(Dual(FedDynParams(alpha=0.3)), [{}, {"state": own}])
