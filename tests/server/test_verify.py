import json
import re
import shutil

import numpy as np
import pytest

from fedcross.analysis.records import record
from fedcross.conf.schema import load
from fedcross.core.errors import DataError
from fedcross.server.commands.main import main
from fedcross.server.launch import launch
from fedcross.server.verify import (
    DIGESTS,
    FURTHER,
    Verdict,
    _chosen,
    _compare,
    _differences,
    _repeatable,
    _Rules,
    overrides,
    verify,
)

SETTINGS = [
    "method=fedcross", "task=digits", "task.limit=120", "model.hidden=[4]", "partition=iid", "partition.clients=3",
    "clients_per_round=2", "rounds=6", "train.epochs=1", "engine.workers=1", "logger=none", "checkpoint.milestone=2",
    "method.alpha={schedule: linear, start: 0.6, end: 0.9, rounds: 4}",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("verify")
    launch(SETTINGS, place / "run")
    record([place / "run"], "small", place / "results", checkpoints=2)
    return place / "results"


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The records of a replay that named its visits by an absolute path."""
    place = tmp_path_factory.mktemp("replayed")
    visits = [*(one for one in SETTINGS if "method" not in one), "method=fedbuff", "rounds=3", "devices=uniform"]
    launch(visits, place / "first")
    launch([*visits, "clock=replay", f"clock.events={place}/first/visits.jsonl"], place / "again")
    record([place / "again"], "small", place / "results", checkpoints=2)
    return place / "results"


@pytest.mark.slow
def test_a_replay_is_repeated_by_the_visits_in_its_record(replayed):
    config = next((replayed / "small").glob("*/.hydra/config.yaml"))
    assert "  events: visits.jsonl\n" in config.read_text()
    found = verify(replayed / "small", rounds=2, seed=0, tolerance=0.0)
    assert [(one.number, one.verdict) for one in found] == [(1, Verdict.EQUAL), (2, Verdict.EQUAL)]


@pytest.mark.slow
def test_a_run_on_the_virtual_clock_goes_on_from_its_checkpoints_without_a_warning(tmp_path, caplog):
    """Its record has no visits, and needs none."""
    launch([*(one for one in SETTINGS if "method" not in one), "method=fedasync", "devices=uniform"], tmp_path / "run")
    record([tmp_path / "run"], "small", tmp_path / "results", checkpoints=2)
    caplog.clear()
    found = verify(tmp_path / "results" / "small", rounds=3, seed=0, tolerance=0.0)
    assert {one.verdict for one in found} == {Verdict.EQUAL}
    assert max(one.number for one in found) > 3
    assert "missing" not in caplog.text


@pytest.mark.slow
def test_a_run_on_the_real_clock_is_repeated_by_the_visits_in_its_record(replayed, tmp_path):
    """Its devices are elsewhere, and its checkpoints are of another clock; an older record has no visits."""
    home = edited(replayed, tmp_path)
    (run,) = home.iterdir()
    config = (run / ".hydra" / "config.yaml").read_text()
    assert "clock:\n  name: replay\n" in config
    real = config.replace("clock:\n  name: replay\n", "clock:\n  name: real\n").replace(
        "events: visits.jsonl", "events: null"
    )
    (run / ".hydra" / "config.yaml").write_text(real)
    (found,) = verify(home, rounds=1, seed=0, tolerance=0.0)
    assert (found.number, found.verdict) == (1, Verdict.EQUAL)
    (run / "visits.jsonl").unlink()
    with pytest.raises(DataError, match=r"repeated by its visits.*Record the run again"):
        verify(home, rounds=1, seed=0, tolerance=0.0)


def edited(results, tmp_path, **files):
    """A copy of the records with `files` (name without suffix -> function of its text) changed."""
    home = tmp_path / "small"
    shutil.copytree(results / "small", home)
    for name, change in files.items():
        file = next(home.glob(f"*/{name}.jsonl"))
        file.write_text(change(file.read_text()))
    return home


@pytest.mark.slow
def test_rounds_from_the_start_and_from_checkpoints_are_equal_to_the_bit(results, caplog, capsys):
    """Nobody is advised to go on with the folders, which are gone at the end."""
    (home,) = (results / "small").iterdir()
    assert sorted(file.name for file in (home / "checkpoints").iterdir()) == [
        "round-000002.safetensors", "round-000005.safetensors",
    ]  # fmt: skip
    found = verify(results / "small", rounds=5, seed=1, tolerance=0.0)
    assert "missing" not in caplog.text
    assert [one.verdict for one in found] == [Verdict.EQUAL] * 5
    assert {one.number for one in found} == {1, 2, 3, 4, 6}
    said = "".join(capsys.readouterr())
    assert "Reading digits" in said
    assert "To go on" not in said
    assert "Finished" not in said


@pytest.mark.slow
def test_a_record_that_tells_other_numbers_is_refused(results, tmp_path, capsys):
    def worse(text):
        lines = [json.loads(line) for line in text.splitlines()]
        return "".join(json.dumps({**line, "test_accuracy": line["test_accuracy"] / 2}) + "\n" for line in lines)

    edited(results, tmp_path, digests=lambda text: text.replace('"digest": "', '"digest": "0'), metrics=worse)
    assert main(["record", "verify", "small", "--results", str(tmp_path), "--rounds", "1"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_record_of_other_data_is_not_run_again(results, tmp_path, capsys):
    home = edited(results, tmp_path)
    (run,) = home.iterdir()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"data": {**result["data"], "train": "0" * 64}}))
    assert main(["record", "verify", "small", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "NOT RUN AGAIN  data: the training examples have SHA-256" in said
    assert "those of the record 0000000000000000..." in said
    assert "DIFFERS" not in said


def test_a_record_whose_settings_changed_is_not_run_again(results, tmp_path):
    home = edited(results, tmp_path)
    (run,) = home.iterdir()
    result = json.loads((run / "result.json").read_text())
    changes = [{"after": 2, "setting": "clients_per_round", "from": 3, "to": 2}]
    (run / "result.json").write_text(json.dumps(result | {"changes": changes}))
    (found,) = verify(home, rounds=2, seed=0, tolerance=0.0)
    assert found.verdict is Verdict.UNCOMPARED
    assert "changed on the way, after round 2: clients_per_round" in found.detail


@pytest.mark.slow
def test_the_runs_own_folder_is_of_use_and_no_other(results, tmp_path):
    """Another run's would start from another model; a record beside it does without."""
    home, run = edited(results, tmp_path), results.parent / "run"
    (recorded,) = home.iterdir()
    shutil.rmtree(recorded / "checkpoints")
    launch([*SETTINGS, "rounds=2", "seed=9", "checkpoint.milestone=1"], tmp_path / "other")
    record([tmp_path / "other"], "small", tmp_path)
    found = verify(home, rounds=3, seed=0, tolerance=0.0, run=run)
    assert {one.verdict for one in found} == {Verdict.EQUAL}
    assert max(one.number for one in found if one.record == recorded.name) > 3
    for wrong, why in ((tmp_path / "other", "another run, for its losses"), (tmp_path / "none", "no checkpoint in")):
        with pytest.raises(DataError, match=f"--run {wrong}: {why}.*Give .* of the recorded run"):
            verify(recorded, rounds=1, seed=0, tolerance=0.0, run=wrong)


def told_by(home, **fields):
    """Change `fields` of the result of the one record in `home`."""
    file = next(home.glob("*/result.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.slow
def test_another_processor_may_differ_by_the_tolerance(results, tmp_path):
    home = edited(results, tmp_path, digests=lambda text: text.replace('"digest": "', '"digest": "0'))
    told_by(home, machine="x86_64 Linux, Another, 2 cores", device="cpu")
    (one,) = verify(home, rounds=1, seed=0, tolerance=1e-5)
    assert one.verdict is Verdict.WITHIN
    assert "other here: machine" in one.detail
    assert "test loss" in one.detail


@pytest.mark.slow
def test_on_the_same_machine_with_the_same_code_another_digest_is_another_model(results, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_COMMIT", "0123abc")
    home = edited(results, tmp_path, digests=lambda text: text.replace('"digest": "', '"digest": "0'))
    told_by(home, commit="0123abc")
    (one,) = verify(home, rounds=1, seed=0, tolerance=1e-5)
    assert one.verdict is Verdict.DIFFERS
    assert "on the same machine, with the same versions, engine and code" in one.detail


def invented(**fields):
    """Return a change of metrics.jsonl that sets the named fields by functions of what they were."""

    def change(text):
        lines = [json.loads(line) for line in text.splitlines()]
        lines = [{**line, **{name: made(line.get(name)) for name, made in fields.items()}} for line in lines]
        return "".join(json.dumps(line) + "\n" for line in lines)

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"test_accuracy": lambda value: value + 0.3}, r"accuracy 0\.\d+, now 0\.\d+"),
        ({"train_loss": lambda _: 0.1}, r"train loss 0\.1, now [12]\.\d+"),
        ({"test_loss": lambda value: value * 1.002}, r"test loss \d\.\d+, now \d\.\d+"),
        ({"width_accuracy": lambda _: {"0.4": 0.5}}, ""),  # of a run with other widths there is nothing to compare
    ],
)
def test_an_equal_model_with_other_numbers_is_told(results, tmp_path, fields, told):
    """The digests are those of the run; its losses and accuracies are what somebody wrote."""
    (one,) = verify(edited(results, tmp_path, metrics=invented(**fields)), rounds=1, seed=0, tolerance=0.02)
    assert one.verdict is (Verdict.DIFFERS if told else Verdict.EQUAL)
    assert re.search(f"the same digest; in the record {told}" if told else "^[0-9a-f]{12}$", one.detail)


def test_one_model_has_one_accuracy_on_one_machine_and_nearly_that_on_another():
    line = {"test_loss": 1.23457, "test_accuracy": 0.5}
    rounded = _differences(line, {"test_loss": 1.2345678, "test_accuracy": 0.5})
    nearly = _differences(line, {"test_loss": 1.2346, "test_accuracy": 0.5001})
    here, there = _Rules(0.02, [], True), _Rules(0.02, ["machine"], True)
    assert [_compare("n", 1, apart, "d", "d", here).verdict for apart in (rounded, nearly)] == [
        Verdict.EQUAL, Verdict.DIFFERS,
    ]  # fmt: skip
    assert _compare("n", 1, nearly, "d", "d", there).verdict is Verdict.EQUAL
    exact = _compare("n", 1, nearly, "d", "d", _Rules(0.0, ["machine"], True))
    assert exact.detail == "d, the same digest; in the record test loss 1.23457, now 1.2346, accuracy 0.5, now 0.5001"


def test_a_gpu_and_an_asynchronous_run_may_have_another_digest_on_the_same_machine():
    apart = _differences({"train_loss": 1.0}, {"train_loss": 1.0})
    assert _compare("n", 1, apart, "d", "e", _Rules(0.02, [], False)).verdict is Verdict.WITHIN
    assert _compare("n", 1, apart, "d", "e", _Rules(0.02, [], True)).verdict is Verdict.DIFFERS
    assert _compare("n", 1, apart, None, "e", _Rules(0.02, [], True)).verdict is Verdict.WITHIN
    assert _repeatable(load([*SETTINGS, "device=cpu"]))
    other = [*(one for one in SETTINGS if "method" not in one), "device=cpu", "method=fedasync", "devices=uniform"]
    assert not _repeatable(load(other))


@pytest.mark.slow
def test_a_record_without_digests_and_checkpoints_starts_at_the_first_round(results, tmp_path):
    home = edited(results, tmp_path)
    (run,) = home.iterdir()
    shutil.rmtree(run / "checkpoints")
    (run / DIGESTS).unlink()
    found = verify(home, rounds=2, seed=0, tolerance=1e-5)
    assert [(one.number, one.verdict) for one in found] == [(1, Verdict.WITHIN), (2, Verdict.WITHIN)]


def test_the_settings_of_a_record_compose_its_configuration(results):
    from fedcross.server.identity import fingerprint

    (home,) = (results / "small").iterdir()
    assert fingerprint(load([*overrides(home), "rounds=6"])) == fingerprint(load(SETTINGS))


def test_the_settings_of_an_older_record_stand_for_what_its_version_did(tmp_path):
    """Its version knew neither the limit nor the correction of FedFan, nor that the pool may open faster."""
    from omegaconf import OmegaConf

    from fedcross.conf.compose import compose

    plain = compose(["task=digits", "method=fedfan"])
    for later in ("limit", "sharpness", "shrink", "memory_mb"):
        del plain["method"][later]
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(plain), tmp_path / ".hydra" / "config.yaml")
    method = load(overrides(tmp_path)).method
    assert (method.limit, method.sharpness, method.shrink, method.memory_mb) == (None, 4.0, 0.0, 0)


def test_a_model_of_an_import_path_is_asked_for_by_it(tmp_path):
    from omegaconf import OmegaConf

    from fedcross.conf.compose import compose

    (tmp_path / ".hydra").mkdir()
    plain = compose(["task=digits", "model=torch.nn:Identity"])
    OmegaConf.save(OmegaConf.create(plain), tmp_path / ".hydra" / "config.yaml")
    assert "model=torch.nn:Identity" in overrides(tmp_path)


def test_without_checkpoints_rounds_are_run_up_to_the_first_digest():
    draw = np.random.default_rng(0)
    assert _chosen({0}, 2, draw, list(range(1, 21)), [5, 10]) == [(0, [1, 2, 3, 4, 5])]
    assert _chosen({0}, 7, draw, list(range(1, 21)), [5, 10]) == [(0, [1, 2, 3, 4, 5, 6, 7])]
    assert _chosen({0}, 2, draw, list(range(1, 21)), [FURTHER + 1]) == [(0, [1, 2])]
    assert _chosen({0}, 2, draw, list(range(1, 21)), []) == [(0, [1, 2])]


def test_no_records(tmp_path):
    with pytest.raises(DataError, match="no records"):
        verify(tmp_path / "none", 1, 0, 0.0)
