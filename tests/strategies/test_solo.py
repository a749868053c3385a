import json
import math

import pytest

from fedcross.client.cache import RunCache
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.solo import Solo
from fedcross.tasks.scoring import Evaluator, Score, mean_score
from tests.support.bench import forgetful, play, states, two_layers
from tests.support.federation import SMALL, run, same, session


def test_two_rounds_of_two_steps_by_hand():
    """One weight u, logits (u x, -u x); the row of u goes up by lr s x sigmoid(-2 s u x), s = 1 for label 0, else -1.

    Two rounds of two steps are four steps of one client's own; nobody sees the other, the server's model stays 0.
    """
    expected = []
    for s, x in ((1, 1.0), (-1, 2.0)):
        u = 0.0
        for _ in range(4):
            u += 0.5 * s * x / (1 + math.exp(2 * s * u * x))
        expected.append(u)
    data = [([[1.0]] * 3, [0] * 3), ([[2.0]], [1])]
    method, kept, uploads = play("solo", two_layers(None, [[0.0], [0.0]]), data, rounds=2)
    assert [u["classifier.weight"][0, 0] for u in uploads] == pytest.approx(expected, abs=1e-15)
    assert [kept[i]["classifier.weight"][0, 0] for i in (0, 1)] == pytest.approx(expected, abs=1e-15)
    assert [u["classifier.weight"][0, 0] for u in method.method.evaluation(method.state).models] in (
        pytest.approx(expected),
        pytest.approx(expected[::-1]),
    )
    assert not method.global_model()["classifier.weight"].any()


def test_a_single_client_is_fedavg_to_the_bit(tmp_path):
    one = ("partition.clients=1", "clients_per_round=1")
    a = run(tmp_path / "a", "method=solo", *one)
    b = run(tmp_path / "b", "method=fedavg", *one)
    assert same(a.driver.evaluation().models[0], b.driver.global_model())
    scores = [json.loads((tmp_path / name / "result.json").read_text())["final_accuracy"] for name in "ab"]
    assert scores[0] == scores[1]


def test_the_score_is_the_participants_mean(tmp_path):
    done = run(tmp_path, "method=solo", "rounds=2")
    config = load([*SMALL, "method=solo"])
    shop = RunCache(config)
    evaluator = Evaluator(lambda _: shop.net.module, shop.data, shop.device)
    alone = [
        evaluator.score(states(done, client, 2))
        for client, visit in done.driver.ledger.clients.accepted.items()
        if visit == 2
    ]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert len(alone) == 3
    assert line["test_accuracy"] == pytest.approx(sum(score.accuracy for score in alone) / 3)
    assert line["test_loss"] == pytest.approx(sum(score.loss for score in alone) / 3)


def test_mean_score_by_hand():
    scores = [Score(0.5, 1.0, (0.0, 1.0, math.nan)), Score(1.0, 3.0, (1.0, 1.0, math.nan))]
    mean = mean_score(scores)
    assert mean is not None
    assert (mean.accuracy, mean.loss, mean.per_class[:2]) == (0.75, 2.0, (0.5, 1.0))
    assert math.isnan(mean.per_class[2])
    assert mean_score([]) is None
    assert mean_score(scores[:1]) is scores[0]


def test_a_round_that_lost_everybody_has_no_score(tmp_path):
    ready = session(tmp_path, "method=solo", "rounds=2", app=forgetful(lambda client, number: number == 1))
    ready.driver.ledger.heard = True  # somebody has trained before, so that the run goes on
    ready.execute()
    first, second = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["test_accuracy"] is None
    assert second["test_accuracy"] is not None


def test_a_lost_client_goes_on_from_its_last_accepted_model(tmp_path):
    """The work of client 2 is lost in round 2; what it made in round 1 is untouched and is what it starts from."""
    six = ("method=solo", "clients_per_round=6")
    done = run(tmp_path / "a", *six, "rounds=2", app=forgetful(lambda client, number: (client, number) == (2, 2)))
    whole = run(tmp_path / "b", *six, "rounds=1")
    assert done.driver.ledger.clients.accepted[2] == 1
    assert same(states(done, 2, 1), states(whole, 2, 1))
    own = states(done, 2, 1)
    assert Solo().objective().start(done.driver.global_model(), own) is own


def test_clients_are_not_asked_to_score_a_model_that_nobody_trains():
    with pytest.raises(ConfigError, match="method=solo has no global model that clients could score"):
        load([*SMALL, "method=solo", "evaluate_clients=true"])
    load([*SMALL, "method=solo", "evaluate_local=true"])
    load([*SMALL, "method=fedavg", "evaluate_clients=true"])
