"""Groups of seeds, their labels and their curves."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcross.analysis.groups import LENGTH, Group, group_runs, spread
from fedcross.analysis.loading import load_runs
from fedcross.analysis.runs import Run
from tests.support.fake import config, write_run


def groups_of(tmp_path: Path, *configs: dict[str, Any]) -> tuple[list[Group], list[str]]:
    for number, values in enumerate(configs):
        write_run(tmp_path / str(number), [0.1, 0.2], values)
    return group_runs(load_runs([tmp_path]).runs)


def test_spread_by_hand():
    # 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, over n - 1 = 2: sqrt(7).
    found = spread([1.0, 2.0, math.nan, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.std == pytest.approx(math.sqrt(7))
    assert math.isnan(spread([1.0]).std)
    assert spread([]).n == 0


def test_seeds_are_one_group_and_other_settings_are_not(tmp_path: Path):
    found, _ = groups_of(
        tmp_path,
        config("fedavg", 2, 2),
        config("fedavg", 1, 2, logger={"name": "none"}, data_root="/elsewhere", device="cuda"),
        config("fedavg", 1, 2, train__lr=0.1),
    )
    assert [[run.seed for run in group.runs] for group in found] == [[1, 2], [1]]
    assert [group.label for group in found] == ["fedavg train.lr=0.01", "fedavg train.lr=0.1"]


def test_runs_of_several_lengths_can_be_seeds_of_one_curve(tmp_path: Path):
    write_run(tmp_path / "1", [0.1, 0.2, 0.3, 0.4], config("fedavg", 1, 4))
    write_run(tmp_path / "2", [0.3, 0.4], config("fedavg", 2, 2))
    write_run(tmp_path / "3", [0.5, 0.6], config("fedavg", 1, 2))
    runs = load_runs([tmp_path]).runs
    assert sorted(group.method for group in group_runs(runs)[0]) == ["fedavg rounds=2", "fedavg rounds=4"]
    ((group,), (note,)) = group_runs(runs, but=LENGTH)
    assert group.method == "fedavg"
    assert [list(axis) for axis in group.curve("rounds")[:2]] == [[1, 2], [0.2, pytest.approx(0.3)]]
    assert "left out" in note


def test_labels_name_only_what_differs(tmp_path: Path):
    found, _ = groups_of(
        tmp_path,
        config("fedcross", 1, 2),
        config("fedcross", 1, 2, method__alpha=0.5),
        config("fedavg", 1, 2),
        config("fedavg", 1, 2, task__name="digits"),
    )
    assert [group.label for group in found] == [
        "fedavg (cifar10)",
        "fedcross alpha=0.5 (cifar10)",
        "fedcross alpha=0.99 (cifar10)",
        "fedavg (digits)",
    ]
    assert found[0].problem == "cifar10, cnn, dirichlet beta=1.0"


def test_beta_tells_dirichlet_partitions_apart_but_not_iid(tmp_path: Path):
    iid = config("fedavg", 1, 2)
    iid["partition"] = {"name": "iid", "clients": 100}
    found, _ = groups_of(tmp_path, config("fedavg", 1, 2), config("fedavg", 1, 2, partition__beta=0.1), iid)
    assert sorted(group.panel for group in found) == ["dirichlet, beta=0.1", "dirichlet, beta=1.0", "iid"]


def test_the_same_seed_twice_counts_once(tmp_path: Path):
    found, notes = groups_of(tmp_path, config("fedavg", 1, 2), config("fedavg", 1, 2))
    assert len(found) == 1
    assert len(found[0].runs) == 1
    assert notes == [f"left out {tmp_path / '0'}: same configuration and seed as {tmp_path / '1'}"]


def test_replays_of_several_records_are_runs_of_their_own(tmp_path: Path):
    """Seeds that have one record each are a group; the same visits twice are one run."""
    replayed = [("a", 1), ("a", 1), ("b", 2)]
    for number, (visits, seed) in enumerate(replayed):
        write_run(tmp_path / str(number), [0.1], config("fedavg", seed, 1, clock={"name": "replay", "events": visits}))
        (tmp_path / str(number) / "visits.jsonl").write_text(visits)
    ((group,), notes) = group_runs(load_runs([tmp_path]).runs)
    assert [run.seed for run in group.runs] == [1, 2]
    assert [note.split(":")[1] for note in notes] == [f" same configuration and seed as {tmp_path / '1'}"]
    for name in ("real", "replay"):
        write_run(tmp_path / name, [0.1], config("fedavg", 2, 1, clock={"name": name, "events": None}))
        (tmp_path / name / "visits.jsonl").write_text("c")
    write_run(tmp_path / "none", [0.1], config("fedavg", 1, 1))
    groups, notes = group_runs(load_runs([tmp_path]).runs)
    assert len(notes) == 1
    assert sorted(group.label for group in groups) == [
        "fedavg clock=none", "fedavg clock=real",
        *(f"fedavg clock=replay clock.visits={digest}" for digest in ("2e7d2c03", "3e23e816", "ca978112")),
    ]  # fmt: skip


def told(folder: Path, **data: str) -> None:
    """Let the result in `folder` say the digests of its data."""
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"data": data}))


def test_runs_on_several_data_sets_are_problems_of_their_own(tmp_path: Path):
    """Also where their seeds differ; the same data, and results that say nothing of theirs, change no label."""
    for name, seed, where in (("a", 1, "cpu"), ("same", 1, "cpu"), ("b", 1, "cpu"), ("c", 2, "cuda")):
        write_run(tmp_path / name, [0.1], config("fedavg", seed, 1, device=where))
        told(tmp_path / name, train=f"{name[0] * 64}" if name != "same" else "a" * 64, test="e" * 64)
    write_run(tmp_path / "older", [0.1], config("fedavg", 3, 1))
    groups, notes = group_runs(load_runs([tmp_path]).runs)
    labels = ["fedavg", "fedavg (data=aaaaaa-eeeeee)", "fedavg (data=bbbbbb-eeeeee)", "fedavg (data=cccccc-eeeeee)"]
    assert sorted(group.label for group in groups) == labels
    assert {group.problem.partition("beta=1.0")[2] for group in groups} == {
        "", *(f", data {one}-eeeeee" for one in ("aaaaaa", "bbbbbb", "cccccc")),
    }  # fmt: skip
    assert [note.split(":")[1] for note in notes] == [f" same configuration and seed as {tmp_path / 'same'}"]
    ((group,), notes) = group_runs(load_runs([tmp_path / "a", tmp_path / "older"]).runs)
    assert (group.label, len(group.runs), notes) == ("fedavg", 2, [])


def test_a_run_whose_settings_changed_is_none_that_had_the_last_ones(tmp_path: Path):
    for name in ("whole", "changed"):
        write_run(tmp_path / name, [0.1, 0.2], config("fedcross", 1, 2))
    file = tmp_path / "changed" / "result.json"
    change = {"after": 1, "setting": "clients_per_round", "from": 5, "to": 10}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"changes": [change]}))
    loaded = load_runs([tmp_path])
    assert loaded.notes == [
        f"{tmp_path / 'changed'}: its settings changed on the way: clients_per_round 5 to round 1, then 10"
    ]
    groups, notes = group_runs(loaded.runs)
    assert sorted(group.label for group in groups) == [
        "fedcross", "fedcross changed=clients_per_round 5 to round 1, then 10",
    ]  # fmt: skip
    assert notes == []


def test_engines_are_compared_where_the_same_seed_ran_on_both(tmp_path: Path):
    found, notes = groups_of(tmp_path, config("fedavg", 1, 2), config("fedavg", 1, 2, engine={"name": "ray"}))
    assert [group.label for group in found] == ["fedavg engine=local", "fedavg engine=ray"]
    assert notes == []


def test_engines_are_one_group_where_each_has_its_own_seeds(tmp_path: Path):
    found, _ = groups_of(tmp_path, config("fedavg", 1, 2), config("fedavg", 2, 2, engine={"name": "ray"}))
    assert [(group.label, len(group.runs)) for group in found] == [("fedavg", 2)]


def test_curve_is_over_the_rounds_that_all_seeds_have(tmp_path: Path):
    write_run(tmp_path / "1", [0.1, None, 0.3, 0.5], config("fedavg", 1, 4), seconds=1.0)
    write_run(tmp_path / "2", [0.3, 0.9, 0.3, 0.6], config("fedavg", 2, 4), seconds=3.0)
    (group,), _ = group_runs(load_runs([tmp_path]).runs)
    x, mean, std = group.curve("seconds")
    # Rounds 1, 3, 4 after 1 and 3 seconds each: means 2, 6, 8. Sample deviation of .1 and .3 is .2 / sqrt(2).
    np.testing.assert_allclose(x, [2, 6, 8])
    np.testing.assert_allclose(mean, [0.2, 0.3, 0.55])
    np.testing.assert_allclose(std, [0.2 / math.sqrt(2), 0, 0.1 / math.sqrt(2)], atol=1e-12)


def test_curve_of_one_seed_has_no_spread(tmp_path: Path):
    (group,), _ = groups_of(tmp_path, config("fedavg", 1, 2))
    assert group.curve("rounds")[2].tolist() == [0, 0]


def test_settings_of_any_type_can_be_grouped(tmp_path: Path):
    run = Run(
        tmp_path, {"method.name": "x", "a": ("1", ("2",)), "b": None, "c": json.loads("1.5")}, {"round": np.ones(1)}
    )
    assert len(group_runs([run])[0]) == 1


def test_runs_of_older_versions_are_seeds_of_the_same_group(tmp_path: Path):
    """Which lack settings that are null, that have the old behaviour, or that do not change the result."""
    old, new = config("fedcross", 1, 2), config("fedcross", 2, 2)
    new |= {"stop_at": 7, "evaluate_at": None}
    new["method"] |= {"nested": False, "nested_steps": "in_turn"}
    (group,), _ = groups_of(tmp_path, old, new)
    assert group.method == "fedcross"
    assert [run.seed for run in group.runs] == [1, 2]


def test_rules_that_decide_which_replies_count_tell_configurations_apart(tmp_path: Path):
    """The default is the same run whether its configuration names it or not; how long to wait decides nothing."""
    found, notes = groups_of(
        tmp_path,
        config("fedavg", 1, 2),
        config("fedavg", 2, 2, federation={"min_replies": 1, "reassign": 0, "hedge": 0, "enough_replies": None}),
        config("fedavg", 3, 2, federation={"min_replies": 1, "deadline_s": 5.0, "wait_s": 9.0}),
        config("fedavg", 1, 2, federation={"min_replies": 1, "enough_replies": 5}),
    )
    assert notes == []
    assert [(group.label, [run.seed for run in group.runs]) for group in found] == [
        ("fedavg", [1, 2, 3]),
        ("fedavg federation.enough_replies=5", [1]),
    ]
