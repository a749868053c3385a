from __future__ import annotations

import tomllib

import pytest

from fedcross.conf.schema import load_text
from fedcross.core.errors import ConfigError
from fedcross.core.paths import import_root
from fedcross.core.run_config import TYPED, overrides_of

DECLARED = tomllib.loads((import_root() / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_flower_knows_each_key_and_none_of_them_is_set() -> None:
    """A typed key that were set would win over an experiment that `overrides` names."""
    assert set(DECLARED) == {*TYPED, "overrides"}
    assert overrides_of({**DECLARED, "overrides": "experiment=demo seed=3"}, nodes=4) == "experiment=demo seed=3"


def test_what_overrides_say_travels_as_it_is() -> None:
    text = "method=fedavg 'task.root=/a b'"
    assert overrides_of({"overrides": text}, nodes=9) == text


def test_typed_keys_are_settings() -> None:
    config = {**DECLARED, "method": "fedcross", "task": "digits", "rounds": 7, "clients": 12, "clients-per-round": 3}
    config |= {"alpha": 0.9, "beta": 0.1, "seed": 5, "local-epochs": 2, "learning-rate": 0.05, "model": "mlp"}
    found = load_text(overrides_of(config))
    assert (found.rounds, found.clients_per_round, found.seed, found.names["method"]) == (7, 3, 5, "fedcross")
    assert found.partition.clients == 12  # type: ignore[attr-defined]
    assert (found.train.epochs, found.train.lr) == (2, 0.05)
    assert found.method.alpha.value == 0.9


def test_overrides_win_over_typed_keys() -> None:
    config = {**DECLARED, "rounds": 7, "seed": 2, "overrides": "rounds=9"}
    assert overrides_of(config) == "seed=2 rounds=9"


@pytest.mark.parametrize(
    ("text", "said"), [("task.file=it's.csv", "No closing quotation"), ("output=a\\", "No escape")]
)
def test_overrides_that_are_no_text_of_a_shell_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        overrides_of({**DECLARED, "overrides": text})
    assert f"overrides={text}: {said}" in str(error.value)


def test_a_deployment_must_say_how_many_clients_it_has() -> None:
    """Its devices know their number of partitions, the server does not: both must compose the same configuration."""
    with pytest.raises(ConfigError, match="How many clients"):
        overrides_of({**DECLARED, "rounds": 5})


@pytest.mark.parametrize(("nodes", "drawn"), [(2, 2), (40, 10)])
def test_without_a_number_of_clients_all_simulated_nodes_are_clients(nodes: int, drawn: int) -> None:
    found = load_text(overrides_of({**DECLARED, "rounds": 1}, nodes=nodes))
    assert found.partition.clients == nodes  # type: ignore[attr-defined]
    assert found.clients_per_round == drawn
    assert overrides_of({**DECLARED, "clients": 5, "clients-per-round": 4}, nodes=nodes) == (
        "partition.clients=5 clients_per_round=4"
    )
