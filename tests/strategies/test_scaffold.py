import json
import math

import numpy as np
import pytest

from fedcross.conf.schema import Train
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.parts.objective import Outcome
from fedcross.strategies.scaffold import Controlled, Scaffold
from fedcross.strategies.wire.protocol import Round, Upload
from tests.support.bench import check_batched, check_resume, forgetful, play, states, two_layers
from tests.support.federation import run, same, session
from tests.support.single import begun

#: Client 0: x = 1, label 0, three times; client 1: x = 2, label 1.
DATA = [([[1.0]] * 3, [0] * 3), ([[2.0]], [1])]
LR = 0.5


def slope(u, client):
    """Return dCE/du for logits (u x, -u x): -s x sigmoid(-2 s u x), s = 1 for label 0, -1 for label 1."""
    s, x = ((1, 1.0), (-1, 2.0))[client]
    return -s * x / (1 + math.exp(2 * s * u * x))


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
    assert method.control()["classifier.weight"][:, 0] == pytest.approx([c, -c], abs=1e-14)
    assert method.global_model()["classifier.weight"][:, 0] == pytest.approx([g, -g], abs=1e-14)
    assert abs(c) > 0.01


def test_first_round_by_hand():
    """Client 0: u1 = .25, u2 = .25 + .5 sigmoid(-.5); c_0 = (0 - u2) / (2 * .5) = -u2."""
    u2 = 0.25 + 0.5 / (1 + math.exp(0.5))
    _, kept, uploads = play("scaffold", two_layers(None, [[0.0], [0.0]]), DATA)
    assert uploads[0]["classifier.weight"][0, 0] == pytest.approx(u2, abs=1e-15)
    assert kept[0]["classifier.weight"][0, 0] == pytest.approx(-u2, abs=1e-15)


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
    assert same(a.method.global_model(), b.method.global_model())
    assert not same(true.method.global_model(), b.method.global_model())


def test_c_is_the_mean_of_what_all_clients_keep(tmp_path):
    done = run(tmp_path, "method=scaffold", "rounds=4", "clients_per_round=4")
    assert done.method.population == 6
    kept = [states(done, client, visit) for client, visit in done.method.accepted.items()]
    for name, c in done.method.control().items():
        assert np.sum([k[name] for k in kept], axis=0) / 6 == pytest.approx(c, abs=1e-6)


def test_the_mean_survives_a_growing_federation():
    """sum c_i = 3: with one client c = 3, once three are there c = 1; a client that leaves takes nothing with it."""
    method = Scaffold(clients_per_round=1)
    method.begin({"w": np.zeros(1, np.float32)}, {"w"})
    method.total = {"w": np.full(1, 3.0, np.float32)}
    method.sample(1, [0])
    assert method.control()["w"] == 3
    method.sample(2, [0, 1, 2])
    method.sample(3, [0])
    assert method.control()["w"] == 1


def test_the_number_of_clients_survives_a_checkpoint():
    """sum c_i = 3 over the three clients that were there: c = 1, also where one alone is there after the resume."""
    method = Scaffold(clients_per_round=1)
    method.begin({"w": np.zeros(1, np.float32)}, {"w"})
    method.total = {"w": np.full(1, 3.0, np.float32)}
    method.sample(1, [0, 1, 2])
    other = Scaffold(clients_per_round=1)
    other.begin({"w": np.zeros(1, np.float32)}, {"w"})
    other.resume(method.checkpoint())
    assert other.control()["w"] == 1
    other.sample(2, [0])
    assert other.control()["w"] == 1


@pytest.mark.slow
def test_a_lost_client_keeps_its_variate(tmp_path):
    """All six are drawn; the work of client 2 is lost in round 2, after it had saved its new state."""
    whole = run(tmp_path / "a", "method=scaffold", "clients_per_round=6", "rounds=1")

    def lost(client, number):
        return client == 2 and number == 2

    done = run(tmp_path / "b", "method=scaffold", "clients_per_round=6", "rounds=2", app=forgetful(lost))
    assert done.method.accepted == {0: 2, 1: 2, 2: 1, 3: 2, 4: 2, 5: 2}
    assert same(states(done, 2, 1), states(whole, 2, 1))
    assert not same(states(done, 2, 2), states(done, 2, 1))
    seen = [states(done, client, visit) for client, visit in done.method.accepted.items()]
    for name, c in done.method.control().items():
        assert np.mean([k[name] for k in seen], axis=0) == pytest.approx(c, abs=1e-6)


@pytest.mark.slow
def test_resume(tmp_path):
    check_resume(tmp_path, "method=scaffold")


def test_wire_is_two_models_each_way(tmp_path):
    report = run(tmp_path, "method=scaffold", "rounds=1").method._report
    assert (report.bytes_down, report.bytes_up) == (2 * 3 * 4 * 4810, 2 * 3 * 4 * 4810)


def test_statistics_of_batch_normalisation_have_no_variate():
    method = Scaffold(clients_per_round=1)
    method.begin({"w": np.zeros(2, np.float32), "mean": np.zeros(2, np.float32), "n": np.array(0)}, {"w"})
    payload = method.dispatch(Round(1, 0, (0,), 0))[0]
    assert list(payload.extras["control"]) == ["w"]
    assert method.upload_extras(payload) == {"control": {"w": ((2,), "float32")}}


def test_clients_batch():
    names = {"features.0.weight": (6, 4), "features.0.bias": (6,), "classifier.weight": (3, 6), "classifier.bias": (3,)}
    control = {name: np.full(shape, 0.2) for name, shape in names.items()}
    own = {name: np.full(shape, 0.5) for name, shape in names.items()}
    extras = {"extras": {"control": control}}
    check_batched(Controlled(Scaffold.Params()), [extras, {**extras, "state": own}])


def test_the_configuration_hands_over_the_momentum():
    from fedcross.conf.cross_checks import remarks
    from fedcross.conf.schema import load

    config = load(["method=scaffold", "train.momentum=0.9"])
    assert config.method.momentum == 0.9
    assert remarks(config) == []
    assert "10.0 times too long" in remarks(load(["method=scaffold", "train.momentum=0.9", "method.steps=plain"]))[0]


def test_a_defended_run_says_that_control_variates_are_not_shortened():
    from fedcross.conf.cross_checks import remarks
    from fedcross.conf.schema import load

    on = "defence.enabled=true"
    assert "control variates" in remarks(load(["method=scaffold", on]))[0]
    assert remarks(load(["method=fedavg", on])) == remarks(load(["method=scaffold", "defence.enabled=false"])) == []


def test_a_round_without_uploads_changes_nothing():
    method = Scaffold(clients_per_round=1)
    method.begin({"w": np.ones(1, np.float32)}, {"w"})
    assert method.aggregate(Round(1, 0, (0,), 0), []) == {}
    assert method.global_model()["w"] == 1


@pytest.mark.slow
def test_a_resume_between_checkpoints_finds_the_clients_states(tmp_path):
    # Checkpoints every 3 rounds; the run is cut off after round 5 and goes back to round 3. Every client drawn in
    # rounds 4 and 5 has saved newer states by then; the ones of round 3 must still be there.
    every = ("method=scaffold", "clients_per_round=5", "checkpoint.every=3", "checkpoint.keep=1")
    whole = run(tmp_path / "whole", *every, "rounds=7")
    cut = session(tmp_path / "cut", *every, "rounds=7")
    real = cut._round

    def interrupted(number):
        if number == 6:
            raise KeyboardInterrupt
        return real(number)

    cut._round = interrupted
    with pytest.raises(KeyboardInterrupt):
        cut.execute()
    resumed = run(tmp_path / "cut", *every, "rounds=7", f"resume={tmp_path / 'cut'}")
    assert same(whole.method.global_model(), resumed.method.global_model())


@pytest.mark.slow
def test_a_resume_from_the_oldest_checkpoint_finds_the_clients_states(tmp_path):
    """Clients keep every state that one of the kept checkpoints continues from, not those of the newest alone."""
    kept = ("method=scaffold", "clients_per_round=6", "checkpoint.every=1", "checkpoint.keep=3")
    whole = run(tmp_path / "whole", *kept, "rounds=7")
    cut = run(tmp_path / "cut", *kept, "rounds=7", "stop_at=6")
    for number in (5, 6):
        cut.checkpoints.path(number).unlink()
    resumed = run(tmp_path / "cut", *kept, "rounds=7", f"resume={tmp_path / 'cut'}")
    assert same(whole.method.global_model(), resumed.method.global_model())


def defended(method, *said):
    """Return the clients whose changes the defence accepts, and take these over; all models stay as they are."""
    still = {"w": np.zeros(2, np.float32), "mean": np.zeros(1, np.float32), "n": np.array(0)}
    uploads = [Upload(i, i, still, {"control": {"w": np.float32(s)}}, 1, {}) for i, s in enumerate(said)]
    found = method.judge_extras(uploads)
    method.aggregate(Round(1, 0, tuple(range(len(said))), 0), found.uploads)
    assert len(found.uploads) + len(found.quarantined) == len(said)
    return [upload.client for upload in found.uploads]


def test_with_the_defence_each_control_variate_has_at_most_the_median_length_in_c():
    """Lengths 5, 5, 10, 20 and 1e30: the median is 10, so c = ((3, 4) + (5, 0) + (0, 10) + (10, 0) + (-10, 0)) / 5.

    Then client 3 has 0, which does not count, and the median is 5: c = ((3, 4) + (5, 0) + (0, 5) + (-5, 0)) / 5.
    """
    method = begun(Scaffold, defence=Defence(enabled=True))
    method.population = 5
    assert defended(method, [3, 4], [5, 0], [0, 10], [20, 0], [-1e30, 0], [np.inf, 0]) == [0, 1, 2, 3, 4]
    assert method.control()["w"].tolist() == pytest.approx([8 / 5, 14 / 5])
    assert defended(method, [0, 0], [0, 0], [0, 0], [-20, 0]) == [0, 1, 2, 3]
    assert method.control()["w"].tolist() == pytest.approx([3 / 5, 9 / 5])


def test_with_the_defence_long_variates_are_counted_also_where_few_take_part():
    """Two of twenty: what the server keeps of the others decides what is usual."""
    method = begun(Scaffold, defence=Defence(enabled=True))
    defended(method, [3, 4], [5, 0], [0, 5])
    still = {"w": np.zeros(2, np.float32), "mean": np.zeros(1, np.float32), "n": np.array(0)}
    few = [Upload(7, 0, still, {"control": {"w": np.float32([1e15, 0])}}, 1, {})]
    few.append(Upload(8, 1, still, {"control": {"w": np.float32([15, 0])}}, 1, {}))
    found = method.judge_extras(few)
    assert (len(found.uploads), found.clipped) == (2, 1)


def test_with_the_defence_small_lies_cannot_add_up():
    """The liar adds 1 in every round; the others stay at 1. It counts as 1 in c, as they do."""
    method = begun(Scaffold, defence=Defence(enabled=True))
    method.population = 10
    for number in range(100):
        defended(method, *[[1.0 if number == 0 else 0.0, 0]] * 9, [1, 0])
    assert method.control()["w"].tolist() == pytest.approx([1.0, 0])


def test_with_the_defence_a_checkpoint_knows_every_clients_variate():
    one, other = (begun(Scaffold, defence=Defence(enabled=True)) for _ in range(2))
    defended(one, [1, 2], [3, 4], [3, 3])
    other.restore(one.state())
    assert {client: kept["w"].tolist() for client, kept in other.kept.items()} == {0: [1, 2], 1: [3, 4], 2: [3, 3]}
    plain = begun(Scaffold)
    defended(plain, [1, 2], [3, 4], [3, 3])
    assert plain.kept == {}


def test_with_the_defence_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    """Twelve clients, so that their order as text is not that of their numbers, nor that in which they took part."""
    rules = ["method=scaffold", "partition.clients=12", "clients_per_round=5", "defence.enabled=true"]
    whole = run(tmp_path / "whole", *rules, "rounds=5")
    run(tmp_path / "cut", *rules, "rounds=4")
    resumed = run(tmp_path / "cut", *rules, "rounds=5", f"resume={tmp_path / 'cut'}")
    assert same(resumed.method.global_model(), whole.method.global_model())
    assert same(resumed.method.control(), whole.method.control())


@pytest.mark.parametrize("defence", [True, False])
def test_one_lie_about_a_control_variate_does_not_end_a_defended_run(tmp_path, monkeypatch, defence):
    real = Controlled.finish

    def finish(self, visit, trained, prepared):
        outcome = real(self, visit, trained, prepared)
        if visit.client == 3 and visit.round == 2:
            outcome.extras["control"] = {n: np.full_like(a, 1e30) for n, a in outcome.extras["control"].items()}
        return outcome

    monkeypatch.setattr(Controlled, "finish", finish)
    sized = ["partition.clients=6", "clients_per_round=6", "rounds=4", f"defence.enabled={str(defence).lower()}"]
    ready = run(tmp_path, "method=scaffold", *sized)
    lost = [line["dropped"] for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert lost == ([0, 0, 0, 0] if defence else [0, 0, 6, 6])
    assert all(np.isfinite(array).all() for array in ready.method.global_model().values())
