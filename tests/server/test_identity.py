"""Which settings make two runs the same."""

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.identity import changes, check_continues, check_data, differing, fingerprint, stored


def identity(*overrides, **more):
    return {"config": stored(load(["task=digits", *overrides]))} | more


@pytest.mark.slow
def test_the_fingerprint_is_of_what_is_computed():
    mark = fingerprint(load([]))
    same = ["rounds=7", "engine=ray", "logger=none", "device=cpu", "data_root=elsewhere", "checkpoint.every=3"]
    same += ["federation.deadline_s=5", "stop.patience=3"]
    assert all(fingerprint(load([override])) == mark for override in same)
    other = ["seed=2", "method.alpha=0.9", "method=fedavg", "train.lr=0.1", "evaluate_every=2", "federation.hedge=1"]
    assert len({mark, *(fingerprint(load([override])) for override in other)}) == 1 + len(other)


def test_a_resumed_run_may_change_what_its_method_lets_it(monkeypatch):
    check_continues(identity(), load(["task=digits", "rounds=9", "engine=ray"]))
    check_continues(identity(), load(["task=digits", "clients_per_round=4"]))
    for override in ("train.lr=0.3", "defence.enabled=true", "seed=2"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            check_continues(identity(), load(["task=digits", override]))


@pytest.mark.parametrize("override", ["defence.enabled=true", "train.lr=0.3", "clock=virtual", "method=fedavg"])
def test_a_setting_that_leaves_or_gets_its_default_is_refused(override):
    assert differing(identity(override), load(["task=digits", override])) == {}
    one = differing(identity(override), load(["task=digits"]))
    other = differing(identity(), load(["task=digits", override]))
    name = "names.method" if override.startswith("method") else override.split("=")[0]
    assert any(found.startswith(name) or found == f"names.{name}" for found in one), one
    assert any(found.startswith(name) or found == f"names.{name}" for found in other), other
    assert all(before != now for before, now in [*one.values(), *other.values()])


def test_what_a_run_changed_is_recorded():
    now = load(["task=digits", "clients_per_round=4", "method.diagnostics_every=5", "federation.min_replies=2"])
    found = changes(identity(changes=[{"after": 1}], rules={}), now, 3)
    assert found == [
        {"after": 1},
        {"after": 3, "setting": "clients_per_round", "from": 10, "to": 4},
        {"after": 3, "setting": "federation.min_replies", "from": 1, "to": 2},
    ]


def test_other_data_and_other_weights_are_refused():
    check_data({"train": "a"}, {"test": "b"})
    check_data(None, {"train": "b"})
    with pytest.raises(ConfigError, match="training examples"):
        check_data({"train": "a"}, {"train": "b"})
    with pytest.raises(ConfigError, match=r"train\.only"):
        check_data({"base": "a"}, {"base": "b"})


def test_a_replayed_record_counts_by_its_content(tmp_path):
    marks = []
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
        marks.append(fingerprint(load(["method=fedasync", "clock=replay", f"clock.events={tmp_path / name}"])))
    assert marks[0] == marks[1] != marks[2]
