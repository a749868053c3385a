"""One hostile client of ten on digits: the defence keeps the order of magnitude of the accuracy."""

import pytest

from tests.support.federation import run

#: With the defence, after 12 rounds, a model is at least this good; without it, at most as good as chance by far.
DEFENDED, RUINED = 0.5, 0.35
ATTACKS = {
    "sign flip": ("attack=sign_flip",),
    "times 1000": ("attack=scaling", "attack.factor=1000"),
    "NaN": ("attack=not_finite",),
}


def accuracy(folder, method, *more):
    own = (f"method={method}", "task.limit=1000", "task.limit_test=300", "partition.clients=10", "clients_per_round=10")
    done = run(folder, *own, "rounds=12", "evaluate_every=12", "train.lr=0.1", "attack.clients=1", *more)
    return done.metrics.lines[-1]["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "method"),
    [("sign flip", "fedcross"), ("times 1000", "fedcross"), ("times 1000", "fedavg"), ("NaN", "fedavg")],
)
def test_a_hostile_client_does_not_ruin_the_model(tmp_path, attack, method):
    assert accuracy(tmp_path, method, *ATTACKS[attack], "defence.enabled=true") > DEFENDED


@pytest.mark.slow
def test_without_the_defence_it_does(tmp_path):
    assert accuracy(tmp_path, "fedavg", *ATTACKS["times 1000"]) < RUINED
