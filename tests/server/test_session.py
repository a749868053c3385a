"""Sessions on small federations: what a run leaves, resume, evaluation, early stopping, privacy."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError, FederationError, StorageError
from fedcross.server.announce import describe, ending
from fedcross.server.sweep import progress
from tests.support.federation import run, same, session


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_model_metrics_result_and_checkpoints(tmp_path):
    finished = run(tmp_path, "logger=tensorboard", "rounds=5", "evaluate_every=2")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"metrics.jsonl", "result.json", "model.safetensors", "checkpoints", "digests.jsonl"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert same(load_file(tmp_path / "model.safetensors"), dict(sorted(finished.driver.global_model().items())))
    assert [line["round"] for line in lines(tmp_path) if line["test_accuracy"] is not None] == [2, 4, 5]
    found = result(tmp_path)
    assert (found["method"], found["task"], found["rounds"]) == ("fedcross", "digits", 5)
    assert len(found["class_accuracy"]) == 10
    assert "changes" not in found
    assert "stopped" not in found


def test_a_run_says_first_what_is_not_the_method_s_own():
    assert "fedgmt" not in describe(compose(["method=fedgmt"])).splitlines()[1]
    chosen = describe(compose(["method=feddyn", "objective=fedgmt", "average=ema", "attack=sign_flip"])).splitlines()[1]
    assert chosen.endswith("objective fedgmt, average ema, attack sign_flip")


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rounds_and_continues_to_the_bit(tmp_path):
    whole = run(tmp_path / "whole", "rounds=4")
    cut = session(tmp_path / "cut", "rounds=4")
    real = cut._round

    def interrupted(number):
        if number == 3:
            raise KeyboardInterrupt
        return real(number)

    cut._round = interrupted
    with pytest.raises(KeyboardInterrupt):
        cut.execute()
    assert len(lines(tmp_path / "cut")) == 2
    resumed = run(tmp_path / "cut", "rounds=4", f"resume={tmp_path / 'cut'}")
    assert same(whole.driver.global_model(), resumed.driver.global_model())


def test_stop_at_ends_without_a_result(tmp_path):
    assert session(tmp_path, "stop_at=1").execute() is None
    assert not (tmp_path / "result.json").exists()
    assert "stop_at=null" in ending(None, tmp_path, 1, 1)


def test_resume_with_another_configuration_names_the_settings(tmp_path):
    run(tmp_path, "rounds=1")
    with pytest.raises(ConfigError) as caught:
        session(tmp_path, "rounds=2", "method.alpha=0.7", "train.lr=0.3", f"resume={tmp_path}")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["method.alpha", "train.lr"]


def test_a_server_refuses_to_go_on_with_other_data(monkeypatch, tmp_path):
    run(tmp_path, "rounds=2", "stop_at=1")
    monkeypatch.setattr("fedcross.server.identity.digests_of", lambda *_: {"train": "0" * 64})
    with pytest.raises(ConfigError, match="training examples have SHA-256 0000000000000000"):
        session(tmp_path, "rounds=2", f"resume={tmp_path}")


def test_a_run_records_what_it_changed_on_its_way(tmp_path):
    resume = f"resume={tmp_path}"
    run(tmp_path, "rounds=3", "stop_at=1")
    more = ("clients_per_round=4", "method.diagnostics_every=2", "federation.min_replies=2")
    run(tmp_path, "rounds=3", resume, *more, "stop_at=2")
    run(tmp_path, "rounds=3", resume, "clients_per_round=4")
    assert result(tmp_path)["changes"] == [
        {"after": 1, "setting": "clients_per_round", "from": 3, "to": 4},
        {"after": 1, "setting": "federation.min_replies", "from": 1, "to": 2},
        {"after": 2, "setting": "federation.min_replies", "from": 2, "to": 1},
    ]


# ---- runs that go wrong -------------------------------------------------------------------------------------------


def test_a_run_that_diverges_fails_with_the_setting_to_lower(tmp_path):
    with pytest.raises(FederationError, match=r"no accepted reply.*lower train\.lr"):
        run(tmp_path, "method=fedavg", "train.lr=1e30", "train.epochs=5")


def test_a_run_that_died_before_its_result_has_the_same_one_after_a_resume(tmp_path):
    run(tmp_path)
    whole = result(tmp_path)
    for name in ("result.json", "model.safetensors"):
        (tmp_path / name).unlink()
    run(tmp_path, f"resume={tmp_path}")
    assert result(tmp_path) == whole


def test_a_run_whose_lines_are_lost_ends_with_its_models_round_and_accuracy(tmp_path):
    run(tmp_path)
    whole = result(tmp_path)
    (tmp_path / "result.json").unlink()
    first = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "metrics.jsonl").write_text(first)
    found = session(tmp_path, f"resume={tmp_path}").execute()
    told = ("rounds", "final_accuracy", "class_accuracy")
    assert [found[name] for name in told] == [whole[name] for name in told]


# ---- clients' accuracies ------------------------------------------------------------------------------------------


def test_every_client_scores_the_global_model_on_its_own_test_part(tmp_path):
    run(tmp_path, "rounds=2", "evaluate_every=2", "evaluate_clients=true", "evaluate_local=true")
    first, last = lines(tmp_path)
    assert "client_accuracy" not in first
    accuracies = [last["client_accuracy"][str(client)] for client in range(6)]
    # iid deals the 100 test digits to 6 clients; their accuracies, weighted by size, make up the central one.
    sizes = [len(part) for part in np.array_split(np.arange(100), 6)]
    assert np.average(accuracies, weights=sizes) == pytest.approx(last["test_accuracy"], abs=0.01)
    assert last["client_accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert last["client_accuracy_std"] == pytest.approx(np.std(accuracies))
    assert last["client_accuracy_worst_tenth"] == min(accuracies)
    assert last["local_accuracy_worst_tenth"] <= last["local_accuracy"] <= 1
    assert result(tmp_path)["client_accuracy_worst_tenth"] == min(accuracies)


# ---- early stopping, privacy --------------------------------------------------------------------------------------


def test_a_run_ends_once_its_target_is_reached_and_is_exact_after_a_resume(tmp_path):
    settings = ("rounds=30", "stop.target=0.3", "train.lr=0.1", "train.epochs=3", "checkpoint.every=50")
    found = session(tmp_path / "a", *settings).execute()
    assert found["stopped"]["reason"] == "target"
    assert found["rounds"] < 30
    assert found["final_accuracy"] == found["stopped"]["value"] >= 0.3
    assert "Stopped early" in ending(found, tmp_path)
    again = session(tmp_path / "a", *settings, f"resume={tmp_path / 'a'}")
    assert progress(tmp_path / "a", again.config) == (found["rounds"], True)
    assert again.execute()["rounds"] == found["rounds"]


def test_privacy_ends_with_epsilon_and_counts_requests_of_a_resumed_run(tmp_path):
    private = ("privacy.enabled=true", "privacy.noise=20", "privacy.randomness=seed", "clients_per_round=6", "rounds=2")
    run(tmp_path, *private, "stop_at=1")
    found = session(tmp_path, *private, f"resume={tmp_path}").execute()
    assert found["privacy"]["uploads"] == 2
    assert "epsilon" in ending(found, tmp_path)
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 12  # 6 of the first process, 6


def test_the_log_of_replies_is_emptied_only_after_a_checkpoint_is_on_disk(tmp_path, monkeypatch):
    one = session(tmp_path)
    one.reply_log = Mock()
    monkeypatch.setattr(one.checkpoints, "save", Mock(side_effect=StorageError("full")))
    with pytest.raises(StorageError):
        one._checkpoint(1)
    one.reply_log.restart.assert_not_called()


def test_validation_judges_the_full_model_alone(tmp_path):
    one = run(tmp_path, "method=heterofl", "method.widths=[1.0,0.5]", "task.validation=0.3", "rounds=1")
    full, arrays = next(iter(one.driver.evaluation().widths.items()))
    assert full.ratio == 1
    expected = one.evaluator.score(arrays, full, held_out=True)
    assert lines(tmp_path)[-1]["validation_accuracy"] == expected.accuracy
