import math

import numpy as np
import pytest

from fedcross.conf.schema import Train
from fedcross.strategies.method import Round
from fedcross.strategies.objective import Outcome
from fedcross.strategies.scaffold import Controlled, Scaffold
from tests.support.bench import forgetful, play, states, two_layers
from tests.support.federation import run, same
from tests.support.game import Game

#: Client 0: x = 1, label 0, three times; client 1: x = 2, label 1.
DATA = [([[1.0]] * 3, [0] * 3), ([[2.0]], [1])]
LR = 0.5


def slope(u, client):
    """Return dCE/du for logits (u x, -u x): -s x sigmoid(-2 s u x), s = 1 for label 0, -1 for label 1."""
    s, x = ((1, 1.0), (-1, 2.0))[client]
    return -s * x / (1 + math.exp(2 * s * u * x))


def control(method):
    """Return c as the server sends it."""
    return method.dispatch(Round(1, 0, (0,), 0))[0].extras["control"]


def of_run(session):
    return {n: total / session.driver.state.population for n, total in session.driver.state.total.items()}


def visit(start, client, c, own):
    """Return u after two corrected steps, and the mean of the two plain gradients on the way."""
    first = slope(start, client)
    u1 = start - LR * (first - own + c)
    second = slope(u1, client)
    return u1 - LR * (second - own + c), (first + second) / 2


def test_two_rounds_of_two_steps_by_hand():
    """Steps go along g - c_i + c, so (G - u2) / (2 lr) = mean(g) - c_i + c, and c_i+ is exactly mean(g).

    Round 1 starts at G = c = c_i = 0; then G = (u(0) + u(1)) / 2, uniform, and c = (c_0 + c_1) / 2.
    """
    g, c, own = 0.0, 0.0, [0.0, 0.0]
    for _ in range(2):
        moved = [visit(g, client, c, own[client]) for client in (0, 1)]
        own = [mean for _, mean in moved]
        g, c = (moved[0][0] + moved[1][0]) / 2, (own[0] + own[1]) / 2
    method, kept, uploads = play("scaffold", two_layers(None, [[0.0], [0.0]]), DATA, rounds=2)
    assert [u["classifier.weight"][0, 0] for u in uploads] == pytest.approx([u for u, _ in moved], abs=1e-14)
    assert [kept[i]["classifier.weight"][0, 0] for i in (0, 1)] == pytest.approx(own, abs=1e-14)
    assert control(method)["classifier.weight"][:, 0] == pytest.approx([c, -c], abs=1e-14)
    assert method.global_model()["classifier.weight"][:, 0] == pytest.approx([g, -g], abs=1e-14)
    assert abs(c) > 0.01


def test_server_step_and_weighting():
    """Half a server step goes half as far; by examples the mean is (3 u(0) + u(1)) / 4."""
    model = [[0.0], [0.0]]
    _, _, (a, b) = play("scaffold", two_layers(None, model), DATA)
    a, b = a["classifier.weight"][0, 0], b["classifier.weight"][0, 0]
    half, _, _ = play("scaffold", two_layers(None, model), DATA, server_lr=0.5)
    assert half.global_model()["classifier.weight"][0, 0] == pytest.approx((a + b) / 4)
    counted, _, _ = play("scaffold", two_layers(None, model), DATA, weighting="examples")
    assert counted.global_model()["classifier.weight"][0, 0] == pytest.approx((3 * a + b) / 4)


def test_with_momentum_the_variate_has_the_gradients_length():
    """Nine steps so short that client 0's gradient stays -1/2: c_0 = -1/2.

    Divided by the plain 9 it would be -1/2 * (9 - .5 (1 - .5^9) / .5) / .5 / 9, nearly twice as long.
    """
    local = Train(lr=1e-7, momentum=0.5, epochs=9, batch=10)
    zeros = [[0.0], [0.0]]
    _, kept, _ = play("scaffold", two_layers(None, zeros), DATA, local=local, momentum=0.5)
    assert kept[0]["classifier.weight"][0, 0] == pytest.approx(-0.5, abs=1e-5)
    _, plain, _ = play("scaffold", two_layers(None, zeros), DATA, local=local, momentum=0.5, steps="plain")
    assert plain[0]["classifier.weight"][0, 0] == pytest.approx(-0.5 * (9 - (1 - 0.5**9)) / 0.5 / 9, abs=1e-5)


@pytest.mark.slow
def test_without_variates_it_is_fedavg_to_the_bit(tmp_path, monkeypatch):
    def nothing(self, visit, trained, prepared):
        return Outcome({"control": {name: np.zeros(p.shape, np.float32) for name, p in visit.params.items()}})

    true = run(tmp_path / "c", "method=scaffold")
    monkeypatch.setattr(Controlled, "finish", nothing)
    monkeypatch.setattr(Controlled, "keeps", False)
    a = run(tmp_path / "a", "method=scaffold")
    b = run(tmp_path / "b", "method=fedavg", "method.weighting=uniform")
    assert same(a.driver.global_model(), b.driver.global_model())
    assert not same(true.driver.global_model(), b.driver.global_model())


def test_c_is_the_mean_of_what_all_clients_keep(tmp_path):
    done = run(tmp_path, "method=scaffold", "rounds=4", "clients_per_round=4")
    assert done.driver.state.population == 6
    kept = [states(done, client, visit) for client, visit in done.driver.ledger.clients.accepted.items()]
    for name, c in of_run(done).items():
        assert np.sum([k[name] for k in kept], axis=0) / 6 == pytest.approx(c, abs=1e-6)


def test_the_mean_survives_a_growing_federation():
    """sum c_i = 3: with one client c = 3, once three are there c = 1; a client that leaves takes nothing with it."""
    method = Game(Scaffold, {"w": np.zeros(1, np.float32)}, {"w"}, clients_per_round=1)
    method.total = {"w": np.full(1, 3.0, np.float32)}
    method.sample(1, [0])
    assert control(method)["w"] == 3
    method.sample(2, [0, 1, 2])
    method.sample(3, [0])
    assert control(method)["w"] == 1


@pytest.mark.slow
def test_a_lost_client_keeps_its_variate(tmp_path):
    """All six are drawn; the work of client 2 is lost in round 2, after it had saved its new state."""
    whole = run(tmp_path / "a", "method=scaffold", "clients_per_round=6", "rounds=1")

    def lost(client, number):
        return client == 2 and number == 2

    done = run(tmp_path / "b", "method=scaffold", "clients_per_round=6", "rounds=2", app=forgetful(lost))
    assert done.driver.ledger.clients.accepted == {0: 2, 1: 2, 2: 1, 3: 2, 4: 2, 5: 2}
    assert same(states(done, 2, 1), states(whole, 2, 1))
    assert not same(states(done, 2, 2), states(done, 2, 1))
    seen = [states(done, client, visit) for client, visit in done.driver.ledger.clients.accepted.items()]
    for name, c in of_run(done).items():
        assert np.mean([k[name] for k in seen], axis=0) == pytest.approx(c, abs=1e-6)


def test_statistics_of_batch_normalisation_have_no_variate():
    method = Game(
        Scaffold,
        {"w": np.zeros(2, np.float32), "mean": np.zeros(2, np.float32), "n": np.array(0)},
        {"w"},
        clients_per_round=1,
    )
    payload = method.dispatch(Round(1, 0, (0,), 0))[0]
    assert list(payload.extras["control"]) == ["w"]
    assert payload.returns == {"control": {"w": ((2,), "float32")}}


def test_the_configuration_hands_over_the_momentum():
    from fedcross.conf.cross_checks import remarks
    from fedcross.conf.schema import load

    config = load(["method=scaffold", "train.momentum=0.9"])
    assert config.method.momentum == 0.9
    assert remarks(config) == []
    assert "10.0 times too long" in remarks(load(["method=scaffold", "train.momentum=0.9", "method.steps=plain"]))[0]


@pytest.mark.slow
def test_a_resume_from_the_oldest_checkpoint_finds_the_clients_states(tmp_path):
    """Clients keep every state that one of the kept checkpoints continues from, not those of the newest alone."""
    kept = ("method=scaffold", "clients_per_round=6", "checkpoint.every=1", "checkpoint.keep=3")
    whole = run(tmp_path / "whole", *kept, "rounds=7")
    cut = run(tmp_path / "cut", *kept, "rounds=7", "stop_at=6")
    for number in (5, 6):
        cut.checkpoints.path(number).unlink()
    resumed = run(tmp_path / "cut", *kept, "rounds=7", f"resume={tmp_path / 'cut'}")
    assert same(whole.driver.global_model(), resumed.driver.global_model())
