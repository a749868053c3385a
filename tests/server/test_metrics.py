"""metrics.jsonl and result.json."""

import json

import pytest

from fedcross.core.errors import FederationError
from fedcross.server.metrics import Metrics, refuse_idle, result_of
from fedcross.tasks.scoring import Score


def line(number, accuracy=None, **more):
    return {"round": number, "test_accuracy": accuracy, "bytes_down": 2, "bytes_up": 1, "seconds": 0.5, **more}


def test_lines_come_back_and_later_ones_are_removed(tmp_path):
    first = Metrics(tmp_path)
    first.run_started({}, [])
    for number in (1, 2, 3):
        first.round_finished(line(number))
    first.run_ended(None)
    second = Metrics(tmp_path, keep_until=2)
    second.run_started({}, [])
    assert [entry["round"] for entry in second.lines] == [1, 2]
    second.round_finished(line(3, 0.5))
    second.run_ended(None)
    assert [json.loads(text)["round"] for text in second.file.path.read_text().splitlines()] == [1, 2, 3]


def test_damaged_and_repeated_lines(tmp_path, caplog):
    texts = [
        json.dumps(line(1)),
        '{"round": 2, "bytes',
        json.dumps(line(3, 0.1)),
        json.dumps(line(3, 0.2)),
        "[]",
        "\xff",
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts))
    assert [(e["round"], e["test_accuracy"]) for e in Metrics(tmp_path, 4).lines] == [(1, None), (3, 0.2)]
    assert "rounds 2, 4 are missing" in caplog.text


def test_the_result_of_a_run():
    lines = [line(1, 0.2), line(2), line(3, 0.6, local_accuracy=0.5, validation_accuracy=0.4), line(4, 0.4)]
    found = result_of(lines, {"method": "m"}, 4, Score(0.4, 1.0, (0.4, float("nan"))))
    assert (found["method"], found["rounds"], found["final_accuracy"], found["best_accuracy"]) == ("m", 4, 0.4, 0.6)
    assert found["last_ten_accuracy"] == pytest.approx(0.4)
    assert (found["class_accuracy"], found["bytes_total"], found["seconds_total"]) == ([0.4, None], 12, 2.0)
    assert (found["local_accuracy"], found["validation_accuracy"]) == (0.5, 0.4)
    assert "width_replies" not in found
    assert found["smoothed_accuracy"] == pytest.approx({"mean": 0.4, "std": (0.08 / 3) ** 0.5, "window": 3})


def test_the_last_ten_evaluations_and_the_best_ten_in_a_row():
    """Twelve evaluations: .9 and .1, five of .4, five of .2: the first ten are the best, the last ten are .3."""
    accuracies = [0.9, 0.1, *[0.4] * 5, *[0.2] * 5]
    found = result_of([line(2 * i + 1, accuracy) for i, accuracy in enumerate(accuracies)], {}, 24)
    assert (found["last_ten_accuracy"], found["smoothed_accuracy"]["mean"]) == pytest.approx((0.3, 0.36))
    assert (found["smoothed_accuracy"]["window"], found["best_accuracy"]) == (10, 0.9)


def test_widths_are_counted_and_the_models_score_stands_for_a_lost_line():
    lines = [line(1, 0.2, width_accuracy={"1": 0.2, "0.5": 0.1}, width_replies={"0.5": 2})]
    found = result_of(lines, {}, 3, Score(0.3, 1.0, ()), {"width_accuracy": {"1": 0.3, "0.5": 0.2}})
    assert (found["rounds"], found["final_accuracy"]) == (3, 0.3)
    assert found["width_accuracy"] == {"1": 0.3, "0.5": 0.2}
    assert found["width_replies"] == {"1": 0, "0.5": 2}


def test_the_models_score_stands_for_a_last_round_that_was_not_evaluated():
    assert result_of([line(1, 0.2), line(2)], {}, 2, Score(0.3, 1.0, ()))["final_accuracy"] == 0.3


def test_a_run_in_which_no_reply_was_accepted_fails():
    lost = {"dropped": 3, "bytes_up": 0, "train_loss": None, "rejected": {"late": 2}}
    with pytest.raises(FederationError, match="late 2"):
        refuse_idle([line(1) | lost], "train.lr", "start again")
    refuse_idle([line(1) | lost, line(2) | lost | {"bytes_up": 1}], "train.lr", "start again")
