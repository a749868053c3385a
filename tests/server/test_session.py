import copy
import json
import math
import re

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from fedcross.client.app import app as client_app
from fedcross.conf.later import LATER
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, FederationError, StorageError
from fedcross.server.app import ending
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.evaluation import across_clients
from fedcross.server.identity import changes, check_continues, check_same, describe, flatten
from fedcross.tasks.scoring import Score
from tests.support.federation import run, same, session
from tests.support.slices import POOL


def test_a_run_leaves_what_the_design_lists(tmp_path):
    finished = run(tmp_path, "logger=tensorboard")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"metrics.jsonl", "result.json", "model.safetensors", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert same(load_file(tmp_path / "model.safetensors"), dict(sorted(finished.method.global_model().items())))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["method"], result["task"], result["rounds"]) == ("fedcross", "digits", 3)


def test_evaluation_only_when_due_and_at_the_end(tmp_path):
    run(tmp_path, "rounds=5", "evaluate_every=2")
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if line["test_accuracy"] is not None] == [2, 4, 5]


def test_training_learns(tmp_path):
    run(tmp_path, "rounds=12", "train.epochs=3", "train.lr=0.1", "evaluate_every=12")
    assert json.loads((tmp_path / "result.json").read_text())["final_accuracy"] > 0.6


def test_the_checkpoint_holds_the_pool(tmp_path):
    finished = run(tmp_path)
    arrays = load_file(tmp_path / "checkpoints" / "round-000003.safetensors")
    assert any(np.array_equal(array, finished.method.pool.rows) for array in arrays.values())  # type: ignore[attr-defined]


def dropped(folder):
    return [json.loads(line)["dropped"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_stops_early_is_not_judged_by_its_first_rounds(tmp_path):
    """One of six clients breaks the rounds that draw it, with this seed the first of two."""
    own = ("rounds=2", "seed=8", "federation.min_replies=3", "attack=not_finite", "attack.clients=1")
    run(tmp_path / "cut", *own, "stop_at=1")
    assert dropped(tmp_path / "cut") == [3]
    run(tmp_path / "cut", *own, f"resume={tmp_path / 'cut'}")
    assert dropped(tmp_path / "cut") == [3, 0]
    with pytest.raises(FederationError, match="not one accepted reply"):
        run(tmp_path / "idle", *own, "rounds=1")


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rounds_and_continues(tmp_path):
    whole = run(tmp_path / "whole", "rounds=4")
    cut = session(tmp_path / "cut", "rounds=4")
    real = cut._round

    def interrupted(number):
        if number == 3:
            raise KeyboardInterrupt
        return real(number)

    cut._round = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.execute()
    assert len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()) == 2
    resumed = run(tmp_path / "cut", "rounds=4", f"resume={tmp_path / 'cut'}")
    assert same(whole.method.global_model(), resumed.method.global_model())


def test_resume_with_another_configuration_names_the_differing_settings(tmp_path):
    run(tmp_path, "rounds=1")
    with pytest.raises(ConfigError) as caught:
        session(tmp_path, "rounds=2", "method.alpha=0.7", "train.lr=0.3", f"resume={tmp_path}")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["method.alpha", "train.lr"]


def test_a_server_refuses_to_go_on_with_other_data(monkeypatch, tmp_path):
    """Also where no command has compared them before. It keeps what it has not itself, and fits older checkpoints."""
    resume = f"resume={tmp_path}"
    run(tmp_path, "rounds=2", "stop_at=1")
    identity = Checkpoints(tmp_path).identity()
    monkeypatch.setattr("fedcross.server.session.digests_of", lambda *_: {"train": "0" * 64})
    with pytest.raises(ConfigError, match="training examples have SHA-256 0000000000000000"):
        session(tmp_path, "rounds=2", resume)
    monkeypatch.setattr("fedcross.server.session.digests_of", lambda *_: {})
    assert session(tmp_path, "rounds=2", resume).data == identity["data"]
    monkeypatch.setattr(Checkpoints, "latest", lambda one, real=Checkpoints.latest: without_data(*real(one)))
    assert session(tmp_path, "rounds=2", resume).data == {}


def without_data(done, state, identity):
    return done, state, {name: value for name, value in identity.items() if name != "data"}


def test_a_run_keeps_what_it_changed_on_its_way(tmp_path):
    """Also over a further resume. What changes no result is not kept."""
    resume = f"resume={tmp_path}"
    run(tmp_path, "rounds=4", "stop_at=1")
    more = ("rounds=4", resume, "clients_per_round=4", "method.diagnostics_every=2", "federation.min_replies=2")
    run(tmp_path, *more, "stop_at=2")
    told = [
        {"after": 1, "setting": "clients_per_round", "from": 3, "to": 4},
        {"after": 1, "setting": "federation.min_replies", "from": 1, "to": 2},
    ]
    assert run(tmp_path, *more, "stop_at=3").changes == told
    run(tmp_path, "rounds=4", resume, "clients_per_round=4")
    told.append({"after": 3, "setting": "federation.min_replies", "from": 2, "to": 1})
    assert json.loads((tmp_path / "result.json").read_text())["changes"] == told
    run(tmp_path / "plain", "rounds=1")
    assert "changes" not in json.loads((tmp_path / "plain" / "result.json").read_text())


def test_a_checkpoint_of_an_older_version_says_no_rules():
    config = load(["task=digits", "federation.min_replies=2"])
    assert changes({"config": describe(config)}, config, 3) == []
    assert changes({"config": describe(config), "rules": {}}, config, 3) == [
        {"after": 3, "setting": "federation.min_replies", "from": 1, "to": 2}
    ]


def test_a_setting_that_had_its_default_is_shown_with_it():
    config = load(["task=digits"])
    changed = load(["task=digits", "evaluate_local=true"])
    before = describe(config)
    del before["evaluate_local"]
    with pytest.raises(ConfigError, match="evaluate_local: the run in that folder has False, now it is True"):
        check_continues({"config": before}, changed)


def test_more_rounds_another_engine_or_place_are_no_difference():
    a = load(("rounds=1", "output=a", "engine.workers=1", "checkpoint.keep=1"))
    b = load(("rounds=9", "output=b", "device=cpu", "checkpoint.keep=5"))
    check_same(describe(a), describe(b))


def test_a_setting_that_a_later_version_adds_refuses_no_older_run_unless_it_is_used():
    config = load(["task=digits"])
    before = describe(config)
    del before["evaluate_local"], before["train"]["lr_min"]  # the version of that run did not know them
    check_continues({"config": before}, config)
    for used in ("evaluate_local=true", "train.lr_min=0.1", "defence.enabled=true"):
        with pytest.raises(ConfigError, match=used.split("=")[0]):
            check_continues({"config": before}, load(["task=digits", used]))


def test_a_later_setting_whose_default_is_not_the_old_behaviour_refuses_an_older_run(monkeypatch):
    monkeypatch.setitem(LATER["train"], "lr_min", 0.5)  # as if runs without this setting had stopped at .5
    config = load(["task=digits"])
    before = describe(config)
    del before["train"]["lr_min"]
    with pytest.raises(ConfigError, match=r"train\.lr_min: the run in that folder has 0\.5, now it is 0\.0"):
        check_continues({"config": before}, config)


def test_a_run_of_an_older_fedfan_is_continued_with_its_own_rule_only():
    plain = ["task=digits", "method=fedfan"]
    first = [
        *plain,
        "method.reach=4",
        "method.sharpness=4",
        "method.limit=null",
        "method.shrink=0",
        "method.memory_mb=0",
    ]
    before = describe(load(first))
    assert not {"sharpness", "limit", "shrink", "memory_mb"} & set(before["method"])
    check_continues({"config": before}, load(first))
    with pytest.raises(ConfigError) as caught:
        check_continues({"config": before}, load(plain))
    assert [fault.split(". ")[0] for fault in caught.value.faults] == [
        "method.limit: the run in that folder has None, now it is 2.0",
        "method.memory_mb: the run in that folder has 0, now it is 256",
        "method.reach: the run in that folder has 4.0, now it is 8.0",
        "method.sharpness: the run in that folder has 4.0, now it is 8.0",
        "method.shrink: the run in that folder has 0.0, now it is 0.002",
    ]


def test_a_run_that_diverges_says_so_once(tmp_path, caplog):
    """All clients of each round reply with a loss beyond every limit; at an ordinary rate nothing is said."""
    run(tmp_path / "well", "method=fedavg")
    assert "diverges" not in caplog.text
    with pytest.raises(FederationError, match="not one accepted reply"):
        run(tmp_path / "badly", "method=fedavg", "train.lr=1e30", "train.epochs=5")
    said = [record.getMessage() for record in caplog.records if "diverges" in record.getMessage()]
    assert len(said) == 1
    assert re.search(r"round 1: (\d+) of \1 replies rejected, .*lower train\.lr", said[0])


def test_a_run_whose_servers_step_ruins_the_model_ends(tmp_path):
    """The clients are innocent: each of their replies is finite until the server has taken its step."""
    settings = ["method=fedbuff", "method.server_lr=1e37", "method.buffer=2", "devices=uniform", "clock=virtual"]
    with pytest.raises(FederationError, match=r"Round \d: the test loss of the global model is ") as told:
        run(tmp_path, *settings, "rounds=8", "clients_per_round=3")
    assert "Lower method.server_lr or train.lr, and start again in another folder." in str(told.value)


def ruined(folder, *overrides):
    """Return what a run says whose model computes nothing finite."""
    with pytest.raises(FederationError) as told:
        session(folder, *overrides)._refuse_ruined(1, Score(0.1, math.inf, ()))
    return str(told.value)


def test_who_ruins_the_model_is_named_by_the_settings_that_the_method_has(tmp_path):
    assert "Lower train.lr, or set defence.enabled=true, and" in ruined(tmp_path / "a", "method=fedavg")
    assert "Lower train.lr, and" in ruined(tmp_path / "b", "method=fedavg", "defence.enabled=true")
    assert "Lower method.radius or train.lr, or set" in ruined(tmp_path / "c", "method=fedmut")
    (tmp_path / "multirun.yaml").touch()
    assert f"remove {tmp_path / 'd'} and start the sweep again." in ruined(tmp_path / "d", "method=fedavg")


def test_diverging_training_is_blamed_on_the_servers_step_too(tmp_path, caplog):
    entry = {"round": 1, "clients": 3, "rejected": {"non_finite": 3}}
    ready = session(tmp_path / "a", "method=fedbuff", "clock=virtual")
    ready._doubt(entry)
    ready.visits.close()
    assert "most likely: lower method.server_lr or train.lr, or set train.clip." in caplog.text
    session(tmp_path / "b", "method=fedavg")._doubt(entry)
    assert "most likely: lower train.lr, or set" in caplog.text


def changed(change):
    """Return the client app with a change: `change(asked, reply)` gets each train request's scalars and its reply."""
    app = ClientApp()
    app.query()(client_app)

    @app.train()
    def train(message, context):
        reply = client_app(message, context)
        change(message.content.config_records["config"], reply)
        return reply

    return app


@pytest.mark.parametrize("method", ["fedavg", "fedbuff"])
def test_a_local_accuracy_that_nobody_asked_for_is_not_used(tmp_path, method):
    """One device says 1 in each round; the run measures none, or in rounds 2 and 3 only, where it is one of three."""

    def claims(asked, reply):
        if asked["client"] == 0:
            reply.content.metric_records["metrics"]["local-accuracy"] = 1.0

    def locally(name, *overrides):
        run(tmp_path / name, f"method={method}", "partition.clients=3", *overrides, app=changed(claims))
        lines = [json.loads(text) for text in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line.get("local_accuracy") for line in lines]

    assert locally("off") == [None, None, None]
    found = locally("on", "evaluate_local=true", "evaluate_every=2")
    assert [value is None for value in found] == [method == "fedavg", False, False]  # a visit of round 2 may end in 1
    assert all(value < 0.9 for value in found if value is not None)


def test_a_width_whose_replies_are_all_lost_is_told_once_and_counted(tmp_path, caplog):
    def broken(asked, reply):
        if asked.get("width", 1.0) == 1:
            raise RuntimeError("lost power")

    run(tmp_path, *POOL, "rounds=12", "evaluate_every=12", app=changed(broken))
    said = [one.getMessage() for one in caplog.records if "no reply was accepted" in one.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("fedcross: round 10: models of width 1 went out in 10 rounds and no reply was accepted")
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["width_replies"] for line in lines] == [{"1": 0, "0.66": 1, "0.4": 1}] * 12
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["width_replies"] == {"1": 0, "0.66": 12, "0.4": 12}


def test_models_of_one_width_have_no_counts_by_width(tmp_path):
    run(tmp_path / "full", "rounds=1")
    run(tmp_path / "narrow", *POOL, "method.widths=[0.4]", "rounds=1")
    for folder in ("full", "narrow"):
        assert "width_replies" not in (tmp_path / folder / "metrics.jsonl").read_text()
        assert "width_replies" not in (tmp_path / folder / "result.json").read_text()


def test_the_virtual_clock_counts_the_examples_that_a_visit_trains_on(tmp_path):
    """Six clients share 200 digits: 34 or 33 each. With train.examples=10 it is 10, each .002, .008 or .03 seconds."""
    few = ("method=fedavg", "clock=virtual", "devices=measured", "train.epochs=2")
    assert session(tmp_path / "all", *few).method.clock.examples == (34, 34, 33, 33, 33, 33)
    clock = session(tmp_path / "few", *few, "train.examples=10").method.clock
    rates = [(0.002, 0.008, 0.03)[kind] for kind in clock.processors]
    assert [clock.seconds(client, 1, 0) for client in range(6)] == pytest.approx([20 * rate for rate in rates])
    assert session(tmp_path / "most", *few, "train.examples=33").method.clock.examples == (33,) * 6


def test_a_switched_group_that_one_run_has_is_off_in_the_other():
    on, off = (load(["task=digits", f"defence.enabled={enabled}"]) for enabled in ("true", "false"))
    with pytest.raises(ConfigError, match=r"defence\.clip: the run in that folder has 1\.0, now it is off\."):
        check_continues({"config": describe(on)}, off)
    with pytest.raises(ConfigError, match=r"defence\.enabled: the run in that folder has off, now it is True\."):
        check_continues({"config": describe(off)}, on)


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_an_unwritable_output_folder_is_refused_before_anything_starts(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        session(blocked / "run")


def test_federated_evaluation_asks_every_client_for_its_own_test_part(tmp_path):
    run(tmp_path, "rounds=2", "evaluate_every=2", "evaluate_clients=true", "evaluate_local=true")
    first, last = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "client_accuracy" not in first
    # iid deals the 100 test digits to 6 clients; their accuracies, weighted by size, make up the central one.
    sizes = [len(part) for part in np.array_split(np.arange(100), 6)]
    accuracies = [last["client_accuracy"][str(client)] for client in range(6)]
    assert np.average(accuracies, weights=sizes) == pytest.approx(last["test_accuracy"], abs=0.01)
    assert last["client_accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert 0 <= last["local_accuracy"] <= 1


def test_a_run_that_died_before_its_result_has_the_same_one_after_a_resume(tmp_path):
    run(tmp_path)
    whole = json.loads((tmp_path / "result.json").read_text())
    for name in ("result.json", "model.safetensors"):
        (tmp_path / name).unlink()
    run(tmp_path, f"resume={tmp_path}")
    assert json.loads((tmp_path / "result.json").read_text()) == whole


def test_a_run_whose_lines_are_lost_ends_with_its_models_round_and_accuracy(tmp_path):
    """The lines are those of round 1; the model is that of round 3."""
    run(tmp_path)
    whole = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    result = session(tmp_path, f"resume={tmp_path}").execute()
    told = ("rounds", "final_accuracy", "class_accuracy")
    assert [result[name] for name in told] == [whole[name] for name in told]
    assert result["best_accuracy"] == max(json.loads(lines[0])["test_accuracy"], whole["final_accuracy"])
    assert (whole.get("rounds_missing"), result["rounds_missing"]) == (None, 2)
    said = ending(result, tmp_path)
    assert said.startswith(f"Finished: 3 rounds, accuracy {100 * whole['final_accuracy']:.2f} %")
    assert said.endswith("Of 2 rounds the line in metrics.jsonl is missing: sums and means lack it")
    assert "missing" not in ending(whole, tmp_path)


def test_clients_that_have_not_answered_at_the_deadline_are_not_evaluated_later(tmp_path):
    """The deadline is over when the first of six has answered."""
    ready = session(tmp_path, "evaluate_clients=true", "federation.deadline_s=1e-9")
    assert len(across_clients(ready.method, ready.grid, 1)["client_accuracy"]) == 1
    assert ready.grid._queue == {}


def test_the_result_has_each_classs_accuracy(tmp_path):
    run(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["class_accuracy"]) == 10
    assert all(0 <= share <= 1 for share in result["class_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        *((f"method={method}",) for method in ("fedcross", "fedct", "scaffold", "fedgen", "fedproc", "clusamp")),
        ("compression.up=int8", "compression.down=int8"),
    ],
    ids=lambda settings: settings[0],
)
def test_packed_messages_change_no_bit(tmp_path, settings):
    records = []
    plain = run(tmp_path / "plain", *settings, "federation.packed=false")
    boxed = session(tmp_path / "packed", *settings, "federation.packed=true")
    push = boxed.grid.push_messages
    boxed.grid.push_messages = lambda messages: push(records.append(m.content) or m for m in messages)
    boxed.execute()
    assert same(plain.method.global_model(), boxed.method.global_model())
    trained = [content for content in records if "arrays" in content]
    assert trained
    assert all(list(record) == ["packed"] for content in trained for record in content.array_records.values())


def test_a_session_talks_to_its_clients_by_way_of_the_judge(tmp_path, monkeypatch):
    """engines/judged.py leaves every grid but that of a deployment as it is; here it makes another one."""
    made = []
    monkeypatch.setattr("fedcross.server.session.judged", lambda grid: made.append(copy.copy(grid)) or made[0])
    ready = session(tmp_path)
    assert made == [ready.grid]


def test_the_page_knows_the_keys_of_the_nodes(tmp_path):
    shown = session(tmp_path, "serve.page=true")
    shown.method.nodes.keys[7] = "fp"
    for node in (7, 8):
        asked = {"round": 1, "exchange": 0, "slot": node, "client": node, "node": node, "bytes_down": 1}
        shown._tell("request_sent", asked)
    assert [device["key"] for device in shown.board.snapshot()["devices"]] == ["fp", ""]
