"""Reading run folders and the numbers of one run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.analysis.loading import BadRunError, load_run
from fedcross.analysis.runs import smoothed
from tests.support.fake import config, write_run


def test_smoothed_by_hand():
    # Windows of 2 over .1 .5 .7 .2: means .3 .6 .45. The second is the largest; its values .5 and .7 lie .1 from .6.
    found = smoothed(np.array([0.1, 0.5, 0.7, 0.2]), window=2)
    assert found.mean == pytest.approx(0.6)
    assert found.std == pytest.approx(0.1)
    assert found.window == 2


def test_smoothed_of_a_short_curve_is_one_window():
    found = smoothed(np.array([0.2, 0.4]))
    assert (found.mean, found.std, found.window) == (pytest.approx(0.3), pytest.approx(0.1), 2)
    assert math.isnan(smoothed(np.array([])).mean)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_smoothed_lies_between_the_mean_of_the_last_window_and_the_best(values: list[float]):
    found = smoothed(np.array(values))
    assert np.mean(values[-10:]) - 1e-12 <= found.mean <= max(values) + 1e-12


@pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")  # raised while Flower is imported
def test_smoothed_is_what_the_server_writes():
    from fedcross.server import accounting

    for length in (1, 9, 10, 11, 40):
        values = np.random.default_rng(length).random(length)
        mine = smoothed(values)
        lines = [
            {"round": 1, "test_accuracy": v, "bytes_down": 0, "bytes_up": 0, "seconds": 0} for v in values.tolist()
        ]
        written = accounting.result(lines, {})["smoothed_accuracy"]
        assert {"mean": mine.mean, "std": mine.std, "window": mine.window} == written


def test_one_run(tmp_path: Path):
    # Evaluated every second round; 1.5 MB and 2 s per round; 5 local epochs.
    run = load_run(write_run(tmp_path / "run", [None, 0.4, None, 0.6, None, 0.5]))
    assert run.finished
    assert (run.final, run.best) == (0.5, 0.6)
    assert run.axis("rounds").tolist() == [1, 2, 3, 4, 5, 6]
    assert run.axis("bytes").tolist() == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    assert run.axis("seconds").tolist() == [2, 4, 6, 8, 10, 12]
    assert run.axis("epochs").tolist() == [5, 10, 15, 20, 25, 30]
    assert run.axis("exchanges").tolist() == [1, 2, 3, 4, 5, 6]
    assert (run.bytes_total, run.seconds_total) == (9e6, 12)
    assert run.reach(0.45, "rounds") == 4
    assert run.reach(0.4, "seconds") == 4
    assert math.isnan(run.reach(0.7, "bytes"))
    assert np.isnan(run.column("nonsense")).all()


def test_exchanges_are_summed_where_the_method_counts_them(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    lines = [json.loads(line) | {"exchanges": 3} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert load_run(folder).axis("exchanges").tolist() == [3, 6]
    for entry in lines:
        del entry["exchanges"]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert load_run(folder).axis("exchanges").tolist() == [1, 2]


def test_until_cuts_a_run_to_equal_rounds(tmp_path: Path):
    run = load_run(write_run(tmp_path / "run", [0.1, 0.5, 0.3, 0.4], config(rounds=4)))
    cut = run.until(2)
    assert (cut.final, cut.best, cut.settings["rounds"]) == (0.5, 0.5, 2)
    assert cut.bytes_total == run.bytes_total / 2
    assert run.final == 0.4
    assert run.until(4) is run
    assert run.until(9) is run


def test_every_keeps_the_evaluations_of_those_rounds(tmp_path: Path):
    """Two runs that differ in how often they were evaluated make one group then."""
    often = write_run(tmp_path / "often", [0.1, 0.5, 0.3, 0.4], config(rounds=4))
    lines = [json.loads(line) for line in (often / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines, 1):
        line["width_accuracy"] = {"0.4": number / 10}
    (often / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = load_run(often, every=2)
    assert run.accuracy.tolist() == [0.5, 0.4]
    assert run.of_size("0.4") == 0.4
    assert (run.smoothed.mean, run.settings["evaluate_every"]) == (pytest.approx(0.45), 2)
    assert run.bytes_total == load_run(often).bytes_total
    assert load_run(often, every=3).of_size("0.4") == 0.3
    with pytest.raises(BadRunError, match="no evaluation"):
        load_run(often, every=5)
    for line in lines[:2]:
        line["test_accuracy"] = None
    (often / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(BadRunError, match="not evaluated every 2 rounds"):
        load_run(often, every=2)
