"""Tables of a report: numbers worked by hand, Markdown and LaTeX."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedcross.analysis import table as text
from fedcross.analysis import tables
from fedcross.analysis.plots import grids, plot_grids
from fedcross.analysis.records import load_runs
from fedcross.analysis.runs import runs_frame
from fedcross.analysis.significance import compare, holm, paired
from tests.support.fake import config, write_run


def frame(tmp_path, **accuracies):
    """A frame of runs; the names are METHOD_SEED."""
    for name, accuracy in accuracies.items():
        method, seed = name.split("_")
        write_run(tmp_path / name, accuracy, config(method, int(seed), len(accuracy)))
    return runs_frame(load_runs([tmp_path])[0])[0]


def test_the_accuracy_table_has_mean_and_spread(tmp_path):
    found = frame(tmp_path, fedavg_1=[0.1, 0.3], fedavg_2=[0.2, 0.5], fedcross_1=[0.4, 0.6])
    table = tables.accuracy_table(found).frame.set_index("method")
    assert table.loc["fedavg", "final %"] == f"40.00 ± {100 * np.std([0.3, 0.5], ddof=1):.2f}"
    assert table.loc["fedcross", "final %"] == "60.00"
    assert table.loc["fedavg", "bytes sent"] == "3.0 MB"
    assert table.loc["fedavg", "seeds"] == "2"


def test_rounds_bytes_and_seconds_to_a_target(tmp_path):
    found = frame(tmp_path, fedavg_1=[0.1, 0.6], fedavg_2=[0.1, 0.2], fedcross_1=[0.1, 0.2])
    table = tables.target_table(found, [0.5]).compact().frame.set_index("method")
    assert table.loc["fedavg", ["reached", "rounds", "bytes sent", "time"]].tolist() == [
        "1 of 2",
        "2",
        "3.0 MB",
        "4.0 s",
    ]
    assert table.loc["fedcross", "rounds"] == "never"
    assert "virtual time" not in table


def test_the_default_target_is_reached_by_all_and_above_chance(tmp_path):
    found = frame(tmp_path, fedavg_1=[0.1, 0.68], fedcross_1=[0.1, 0.71])
    assert tables.default_target(found) == [0.65]


def test_paired_differences_are_scipys():
    first, second = pd.Series([0.5, 0.6, 0.7], [1, 2, 3]), pd.Series([0.4, 0.45, 0.65], [1, 2, 3])
    found, d = paired(first, second), [0.1, 0.15, 0.05]
    assert found["difference"] == pytest.approx(0.1)
    assert found["t"] == pytest.approx(stats.ttest_rel(first, second).pvalue)
    half = stats.t.ppf(0.975, 2) * np.std(d, ddof=1) / np.sqrt(3)
    assert (found["low"], found["high"]) == pytest.approx((0.1 - half, 0.1 + half))
    assert np.isnan(found["wilcoxon"])


@pytest.mark.parametrize(("pairs", "t", "wilcoxon"), [(2, False, None), (5, True, None), (6, True, 2 / 2**6)])
def test_a_test_needs_enough_pairs(pairs, t, wilcoxon):
    """All differences are above 0: of 2^n signs only two are as extreme. The difference is the mean of 1, 2, ..."""
    found = paired(pd.Series(np.arange(1.0, pairs + 1)), pd.Series(np.zeros(pairs)))
    assert (found["n"], found["difference"]) == (pairs, (pairs + 1) / 2)
    assert np.isnan(found["t"]) != t
    assert found["wilcoxon"] == pytest.approx(wilcoxon or np.nan, nan_ok=True)


def test_what_a_defence_did_is_per_round_of_the_runs_that_had_one(tmp_path):
    """Four rounds with the defence, 2 quarantined and 3 clipped in each; the other run does not count."""
    for name, enabled in (("on", True), ("off", False)):
        folder = write_run(tmp_path / name, [0.1] * 4, config("fedavg", 1, 4, defence={"enabled": enabled}))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        more = {"rejected": {"quarantined": 2, "late": 9}, "clipped": 3}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in lines))
    note = tables.accuracy_table(runs_frame(load_runs([tmp_path])[0])[0]).note
    assert "1 of 2 runs: 3 clipped, 0 lightened, 2 quarantined" in note


def test_holm_by_hand():
    """Sorted 0.01, 0.03, 0.04: times 3, 2, 1 is 0.03, 0.06, 0.04; never below the one before."""
    assert holm(pd.Series([0.04, np.nan, 0.01, 0.03])).tolist() == pytest.approx(
        [0.06, np.nan, 0.03, 0.06], nan_ok=True
    )


def test_only_shared_seeds_are_compared(tmp_path):
    found = frame(tmp_path, fedavg_1=[0.1], fedavg_2=[0.2], fedcross_1=[0.3], fedcross_2=[0.5], fedcross_3=[0.9])
    (row,) = compare(found).to_dict("records")
    assert (row["first"], row["second"], row["n"]) == ("fedcross", "fedavg", 2)
    assert row["difference"] == pytest.approx(0.25)


def test_an_ablation_grid(tmp_path):
    for i, (alpha, selection) in enumerate([(0.9, "lowest"), (0.9, "highest"), (0.99, "lowest")]):
        values = config("fedcross", 1, 1, method__alpha=alpha, method__selection=selection)
        write_run(tmp_path / str(i), [0.1 * (i + 1)], values)
    found = grids(runs_frame(load_runs([tmp_path])[0])[0])
    (table,) = tables.ablation_tables(found)
    assert table.frame.to_numpy().tolist() == [["0.9", "20.00 (n=1)", "10.00 (n=1)"], ["0.99", "–", "30.00 (n=1)"]]
    plot_grids(found, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_latex_has_a_label_aligned_numbers_published_names_and_the_best_in_bold(tmp_path):
    found = frame(tmp_path, fedavg_1=[0.1, 0.3], fedcross_1=[0.4, 0.6])
    latex = tables.accuracy_table(found).compact().latex()
    assert r"\label{tab:accuracy" in latex
    assert r"\begin{tabular}{lrrrrrrrrr}" in latex
    assert r"FedCross & \textbf{60.00}" in latex
    assert "FedAvg & 30.00" in latex
    assert len(latex[latex.index(r"\caption{") :].splitlines()[0].split()) < 25


def test_markdown_pads_and_escapes():
    table = text.Table("T", pd.DataFrame({"method": ["a|b"], "n": ["1"]}), "Note.")
    assert table.markdown() == "## T\n\n| method | n   |\n|--------|-----|\n| a\\|b   | 1   |\n\nNote.\n"


@pytest.mark.parametrize(("count", "expected"), [(999, "999 B"), (1_234_567, "1.2 MB"), (3e12, "3.0 TB")])
def test_sizes(count, expected):
    assert text.size(count) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(8.06, "8.1 s"), (200, "3m 20s"), (7_500, "2h 05m")])
def test_durations(seconds, expected):
    assert text.duration(seconds) == expected


def test_comparisons_of_one_problem_do_not_change_those_of_another(tmp_path):
    values = {"fedavg": (0.1, 0.2, 0.35), "fedcross": (0.3, 0.5, 0.6), "fedprox": (0.2, 0.2, 0.4)}
    one = frame(
        tmp_path, **{f"{name}_{seed}": [value] for name, all_ in values.items() for seed, value in enumerate(all_)}
    )
    alone, both = compare(one), compare(pd.concat([one, one.assign(problem="another")]))
    assert both["holm"][both["problem"] != "another"].tolist() == alone["holm"].tolist()
    assert alone["holm"].notna().all()
