from __future__ import annotations

import tomllib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.conf.schema import load, load_text
from fedcross.core.errors import ConfigError
from fedcross.core.paths import import_root
from fedcross.core.settings import (
    DEVICE,
    TYPED,
    bound_partition,
    device_name,
    gpus_for,
    join,
    node_name,
    overrides_of,
    quote,
    split,
    unquote,
)

DECLARED = tomllib.loads((import_root() / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("train.lr=-1", "train.lr=-1: must be greater than 0."),
        ("train.lr=true", "train.lr=true: must be a number."),
        ("rounds=1.5", "rounds=1.5: must be a whole number."),
        ("method.alpha=2", "method.alpha=2: must be from 0.5 to 1."),
        ("method.alpha=abc", "method.alpha=abc: must be from 0.5 to 1."),
        ("method.alpha={schedule:linear,start:0.5,rounds:3}", "method.alpha.end: this setting is required."),
        ("device=gpu", "device=gpu: must be written as auto or cpu or cuda"),
        ("log.audit=maybe", "log.audit=maybe: must be 'auto' or true or false."),
        ("model.hidden=3", "model.hidden=3: must be a list. Write model.hidden=[3]."),
        ("model.hidden=[8,x]", "model.hidden.1=x: must be a whole number."),
        ("engine=remote", "engine.address: this setting is required. Write engine.address=superlink.example.org:8000."),
    ],
)
def test_a_fault_names_the_setting_the_value_and_what_is_allowed(settings: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([settings])
    assert said in str(caught.value)


@settings(max_examples=30)
@given(st.text())
def test_a_quoted_text_comes_back(text: str) -> None:
    assert unquote(quote(text)) == text
    assert split(join([f"output={quote(text)}"])) == [f"output={quote(text)}"]


def test_flower_knows_each_key_and_none_of_them_is_set() -> None:
    """A typed key that were set would win over an experiment that `overrides` names."""
    assert set(DECLARED) == {*TYPED, "overrides"}
    assert overrides_of({**DECLARED, "overrides": "experiment=demo seed=3"}, nodes=4) == "experiment=demo seed=3"


def test_typed_keys_are_settings_and_overrides_win() -> None:
    config = {**DECLARED, "method": "fedcross", "task": "digits", "rounds": 7, "clients": 12, "clients-per-round": 3}
    config |= {"alpha": 0.9, "beta": 0.1, "seed": 5, "local-epochs": 2, "learning-rate": 0.05, "model": "mlp"}
    found = load_text(overrides_of(config))
    assert (found.rounds, found.clients_per_round, found.seed, found.names["method"]) == (7, 3, 5, "fedcross")
    assert found.partition.clients == 12  # type: ignore[attr-defined]
    assert (found.train.epochs, found.train.lr, found.method.alpha) == (2, 0.05, 0.9)
    assert overrides_of({**DECLARED, "rounds": 7, "seed": 2, "overrides": "rounds=9"}) == "seed=2 rounds=9"


def test_overrides_that_are_no_text_of_a_shell_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"overrides=task\.file=it's\.csv: No closing quotation"):
        overrides_of({**DECLARED, "overrides": "task.file=it's.csv"})


@pytest.mark.parametrize(("nodes", "drawn"), [(2, 2), (40, 10)])
def test_without_a_number_of_clients_all_simulated_nodes_are_clients(nodes: int, drawn: int) -> None:
    expected = f"rounds=1 partition.clients={nodes} clients_per_round={drawn}"
    assert overrides_of({**DECLARED, "rounds": 1}, nodes=nodes) == expected
    with pytest.raises(ConfigError, match="How many clients"):  # a deployment's devices know it, its server does not
        overrides_of({**DECLARED, "rounds": 5})


def test_the_machines_device_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    assert device_name("cuda") == "cuda"
    monkeypatch.setenv(DEVICE, "mps")
    assert device_name("cuda") == "mps"
    monkeypatch.setenv(DEVICE, "cuda:x")
    with pytest.raises(ConfigError, match="cuda:x"):
        device_name("cpu")


@pytest.mark.parametrize(("name", "found"), [("auto", 4), ("cuda", 4), ("cuda:3", 1), ("cpu", 0), ("mps", 0)])
def test_how_many_gpus_clients_may_use(monkeypatch: pytest.MonkeyPatch, name: str, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_for(name) == found


def test_a_nodes_name_is_its_partition() -> None:
    assert [bound_partition(name) for name in (node_name(12), "partition-01", "partition-", "x")] == [12] + [None] * 3
