"""A record is confirmed by its digest, or by its accuracy; a changed one is not."""

import json

import pytest

from fedcross.analysis.records import record
from fedcross.core.errors import DataError
from fedcross.server.commands import record as commands
from fedcross.server.commands.record import verify
from fedcross.server.launch import launch

SETTINGS = [
    "method=fedcross", "objective=fedprox", "task=digits", "task.limit=120", "model.hidden=[4]", "partition=iid",
    "partition.clients=3", "clients_per_round=2", "rounds=3", "train.epochs=1", "engine.workers=1", "logger=none",
    "checkpoint.every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    place = tmp_path_factory.mktemp("verify")
    launch([*SETTINGS, f"output={place}/run"], place / "run")
    record([place / "run"], "small", place / "results")
    return place / "results" / "small"


@pytest.mark.slow
def test_a_record_is_confirmed_by_its_digest(table):
    (found,) = verify(table)
    assert (found.round, found.same) == (3, True)
    assert "digest" in found.detail


@pytest.mark.slow
def test_another_digest_is_compared_by_the_accuracy(table, tmp_path):
    for name in ("runs.jsonl", "curve.csv"):
        (tmp_path / name).write_text((table / name).read_text())
    first, line = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    line["digests"] = {"3": "0" * 64}
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(line)}\n")
    (found,) = verify(tmp_path)
    assert found.same
    curve = (tmp_path / "curve.csv").read_text().splitlines()
    name, number, _, *rest = curve[-1].split(",")
    (tmp_path / "curve.csv").write_text("\n".join([*curve[:-1], ",".join([name, number, "0.999", *rest])]) + "\n")
    (found,) = verify(tmp_path)
    assert found.same is False


def test_what_cannot_be_compared_says_so(table, tmp_path):
    with pytest.raises(DataError, match="no record"):
        next(verify(table, "none"))
    for name in ("runs.jsonl", "curve.csv"):
        (tmp_path / name).write_text((table / name).read_text())
    first, line = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    first["experiment"]["method.unheard_of"] = 3
    (tmp_path / "runs.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(line)}\n")
    (found,) = verify(tmp_path)
    assert found.same is None
    assert "method.unheard_of" in found.detail


def test_the_command_fails_unless_every_record_is_confirmed(monkeypatch, capsys):
    for same, code in ((True, 0), (None, 1), (False, 1)):
        monkeypatch.setattr(commands, "verify", lambda *_, same=same: [commands.Compared("a", 1, same, "")])
        assert commands.main(["verify", "small"]) == code
