import json

import numpy as np
import pytest

from fedcross.client.attack import malicious, poison
from fedcross.conf.schema import Attack, load
from fedcross.core.errors import ConfigError
from tests.support.federation import run, same

RECEIVED = {"w": np.array([1.0, 2.0], np.float32), "b": np.array([0.0], np.float32)}
TRAINED = {
    "w": np.array([4.0, 6.0], np.float32),
    "b": np.array([12.0], np.float32),
    "count": np.array(7),
}  # update (3, 4) and 12: norm 13


def poisoned(name, **values):
    made = poison(Attack(name=name, **values), RECEIVED, TRAINED, np.random.default_rng(0))
    assert list(made) == list(TRAINED)
    assert all(made[n].dtype == TRAINED[n].dtype and made[n].shape == TRAINED[n].shape for n in TRAINED)
    assert made["count"] == 7
    return made


def test_by_hand():
    # scaling: 1 - 10*3, 2 - 10*4, 0 - 10*12; stealth: 1 - 3, 2 - 4, 0 - 12; sign flip: the trained values negated.
    assert poisoned("scaling")["w"].tolist() == [-29, -38]
    assert poisoned("scaling")["b"].tolist() == [-120]
    assert poisoned("scaling", factor=2.0)["w"].tolist() == [7, 10]
    assert poisoned("stealth")["w"].tolist() == [-2, -2]
    assert poisoned("sign_flip")["w"].tolist() == [-4, -6]


def test_a_factor_that_leaves_float32_is_sent_without_a_word():
    """Warnings are errors here; the guard rejects what is not finite."""
    assert not np.isfinite(poisoned("scaling", factor=1e50)["w"]).any()


def test_noise_has_the_size_it_says():
    many = {"w": np.zeros(10_000, np.float32)}
    trained = {"w": np.full(10_000, 0.13, np.float32)}  # norm 13
    made = poison(Attack(name="noise"), many, trained, np.random.default_rng(1))
    assert np.linalg.norm(made["w"]) == pytest.approx(130, rel=0.05)


def test_nan_is_one_value():
    made = poisoned("not_finite")
    assert sum(int(np.isnan(a).sum()) for a in (made["w"], made["b"])) == 1
    assert not np.isnan(TRAINED["w"]).any()


def test_the_draw_is_the_seeds_alone():
    attack = Attack(name="stealth", clients=3)
    assert malicious(attack, 20, 1) == malicious(attack, 20, 1)
    assert len(malicious(attack, 20, 1)) == 3
    assert malicious(attack, 20, 1) != malicious(attack, 20, 2)
    assert malicious(Attack(clients=3), 20, 1) == frozenset()
    assert malicious(Attack(name="not_finite", clients=2), 20, 1) < malicious(
        Attack(name="not_finite", clients=5), 20, 1
    )


def test_more_attackers_than_clients():
    with pytest.raises(ConfigError, match=r"attack.clients=7"):
        load(("attack=stealth", "attack.clients=7", "partition.clients=6", "clients_per_round=3"))
    with pytest.raises(ConfigError, match=r"attack.clients=7"):
        malicious(Attack(name="not_finite", clients=7), 6, 1)


@pytest.mark.slow
def test_every_kind_has_its_file_and_the_default_is_none():
    for name in ("none", "sign_flip", "scaling", "stealth", "noise", "not_finite"):
        assert load((f"attack={name}",)).attack.name == name
    assert load(()).attack.name == "none"


def test_a_nan_attack_is_rejected_by_the_guard(tmp_path):
    run(tmp_path, "rounds=1", "clients_per_round=6", "attack=not_finite", "attack.clients=2")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["rejected"] == {"non_finite": 2}


@pytest.mark.slow
def test_an_attack_does_nothing_to_the_honest(tmp_path):
    honest = run(tmp_path / "a", "rounds=1", "method=fedavg")
    drawn = set(honest.driver.ledger.clients.accepted)  # all three replied
    mean = honest.driver.global_model()
    # Seed 1: whether its one malicious client is among the three drawn decides whether anything differs.
    bad = malicious(Attack(name="stealth"), 6, 1)
    attacked = run(tmp_path / "b", "rounds=1", "method=fedavg", "attack=stealth")
    assert same(attacked.driver.global_model(), mean) == (not bad & drawn)


def test_as_many_clients_are_malicious_as_asked_for():
    for seed in range(20):
        assert len(malicious(Attack(name="scaling", clients=7), 10, seed)) == 7
    assert malicious(Attack(name="scaling", clients=6), 6, 1) == set(range(6))
