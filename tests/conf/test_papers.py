"""Every experiment against the papers' values, and the page that maps their figures and tables to commands."""

import functools
import re
from pathlib import Path

import pytest

from fedcross.conf.compose import CONF, compose, composed, resolved
from fedcross.server.sweep import choices, plan
from tests.conf.paper_values import OURS, REASONS, VALUES

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
EXPERIMENTS = sorted(
    str(path.relative_to(CONF / "experiment").with_suffix(""))
    for path in (CONF / "experiment").glob("*/[!_]*.yaml")
    if path.parent.name not in {"async", "family", "hetero"}  # tables of our own, of no paper
)
#: Stands for a figure where that is too dear; its values are its own.
STANDS_IN = {
    "fedcross/as_published",
    "fedcross/acceleration_small",
    "fedct/order",
    "fedct/order_host_lr",
    "fedct/order_lenet5",
}


def overrides(experiment: str) -> list[str]:
    """Return the overrides that stand for the first column of the table."""
    name, *more = experiment.split()
    return [name if "=" in name else f"experiment={name}", *more]


def flat(node: object, prefix: str = "") -> dict[str, object]:
    """Return nested settings, lists too, as one level of dotted names."""
    if isinstance(node, dict):
        return {
            k: v for name, one in node.items() for k, v in flat(one, f"{prefix}.{name}" if prefix else name).items()
        }
    if isinstance(node, list):
        return {k: v for i, one in enumerate(node) for k, v in flat(one, f"{prefix}.{i}").items()}
    return {prefix: node}


@functools.cache
def column(experiment: str) -> tuple[dict[str, str], dict[str, object]]:
    """Return what the experiment sweeps, and all settings of its first job."""
    given = overrides(experiment)
    (swept,) = resolved(composed(given), "hydra.sweeper.params") if given[0].startswith("experiment=") else ({},)
    params = swept or {}
    pinned = [values[0] for values in choices([f"{name}={value}" for name, value in params.items()]).values()]
    job = plan([], [*given, *pinned]).jobs[0] if params else given
    return {key.lstrip("+"): str(value) for key, value in params.items()}, flat(compose([*job, *given[1:]]))


def ours(experiment: str, name: str) -> object:
    """Return our value of setting `name`: all values of a sweep as a sorted list, else the value of the first job."""
    swept, first = column(experiment)
    fixed = any(o.startswith(f"{name}=") for o in overrides(experiment)[1:])
    if name in swept and not fixed:
        found = [number(text) for text in swept[name].split(",")]
        return sorted(found, key=str) if len(found) > 1 else found[0]
    return first[name]


def others(experiment: str) -> list[str]:
    """Return the columns of a sweep beside its first one, which another task or model may give other settings."""
    swept, _ = column(experiment)
    return [f"{experiment} {g}={v}" for g in ("task", "model") for v in swept.get(g, "").split(",")[1:]]


def number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def same(mine: object, papers: object) -> bool:
    if isinstance(papers, list):
        return isinstance(mine, list) and mine == sorted((number(str(v)) for v in papers), key=str)
    if isinstance(papers, int | float):
        return isinstance(mine, int | float) and float(mine) == pytest.approx(float(papers))
    return mine == papers


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{v.experiment}-{v.name}")
def test_every_setting_is_the_papers_or_has_a_reason(value):
    mine = ours(value.experiment, value.name)
    reason = REASONS.get((value.experiment, value.name))
    if reason is None:
        assert same(mine, value.value), f"{value.place}: {value.value}, ours: {mine}"
    else:
        assert not same(mine, value.value), f"no reason is needed any more: {reason}"


@pytest.mark.slow
@pytest.mark.parametrize("value", OURS, ids=lambda v: f"{v.experiment}-{v.name}")
def test_what_no_paper_gives_is_what_was_decided(value):
    assert same(ours(value.experiment, value.name), value.value), value.place


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [one for one in EXPERIMENTS if one not in STANDS_IN])
def test_the_other_columns_of_a_sweep_have_the_same_settings_or_rows_of_their_own(experiment):
    wanted = {(value.experiment, value.name): value.value for value in VALUES}
    swept, _ = column(experiment)
    for other in others(experiment):
        for name in [name for given, name in wanted if given == experiment and name not in swept]:
            value = wanted.get((other, name), wanted[experiment, name])
            reason = REASONS.get((other, name)) or REASONS.get((experiment, name))
            assert reason or same(ours(other, name), value), f"{other} {name}: {value}, ours: {ours(other, name)}"


def test_every_value_has_a_place_and_every_reason_a_value():
    assert all(value.place.paper and value.place.section for value in [*VALUES, *OURS])
    listed = [(value.experiment, value.name) for value in [*VALUES, *OURS]]
    assert len(listed) == len(set(listed))
    assert set(REASONS) <= set(listed)
    assert all(len(reason) > 20 for reason in REASONS.values())


def test_every_experiment_has_values_and_stands_on_the_page():
    compared = {value.experiment.split()[0] for value in VALUES}
    assert set(EXPERIMENTS) - STANDS_IN <= compared
    named = set(re.findall(r"experiment=((?:fedcross|fedct|fedfusion)/\w+)", PAGE.read_text()))
    assert named == set(EXPERIMENTS)


#: Last table and last figure of each paper that we know of.
LAST = {"FedCross": (3, 9), "FedFusion": (2, 4), "FedCT": (6, 11)}
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6}


def numbers(cell: str, word: str) -> set[int]:
    """Return the numbers after Fig. or Figs., Table or Tables in the first column of a row."""
    lists = re.findall(rf"{word}s?\.? ((?:(?:[0-9]+|[IV]+)\b(?:, | and )?)+)", cell)
    found = [one for text in lists for one in re.findall("[0-9IV]+", text)]
    return {ROMAN[one] if one in ROMAN else int(one) for one in found}


def test_no_figure_and_no_table_is_left_out():
    """Each has a row: with a command, with the row whose runs it uses, or with "none" and the reason."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        tables, figures = LAST[section.split()[0]]
        lines = [line for line in section.splitlines() if line.startswith("|")][2:]
        rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
        what = [row[0] for row in rows]
        assert set.union(*(numbers(cell, "Table") for cell in what)) == set(range(1, tables + 1)), section
        assert set.union(*(numbers(cell, "Fig") for cell in what)) == set(range(1, figures + 1)), section
        for row in rows:
            assert re.match(r"`fedcross experiment=|the runs of|none$", row[1]), row
            assert row[1] != "none" or len(row[2]) > 15, f"no reason: {row}"
