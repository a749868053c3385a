"""The picture of the curves."""

from pathlib import Path

import numpy as np
import pytest

from fedcross.analysis.axes import AXES
from fedcross.analysis.curves import COLOURS, DASHES, MOST, named, plot_curves, styles, trailing_mean
from fedcross.analysis.groups import Group, group_runs
from fedcross.analysis.loading import load_runs
from tests.support.fake import config, write_run


def test_trailing_mean_by_hand():
    np.testing.assert_allclose(trailing_mean(np.array([1.0, 3.0, 5.0, 7.0]), window=2), [1, 2, 4, 6])


@pytest.mark.slow
@pytest.mark.parametrize("x", AXES)
def test_every_axis_can_be_drawn(tmp_path: Path, x: str):
    write_run(tmp_path / "1", [0.1, 0.2], config("fedavg", 1, 2))
    write_run(tmp_path / "2", [0.1, 0.3], config("fedavg", 2, 2))
    write_run(tmp_path / "3", [0.1, 0.3], config("fedavg", 1, 2, task__name="digits"))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    plot_curves(groups, x, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_long_curves_and_many_curves(tmp_path: Path):
    for number in range(9):
        write_run(tmp_path / str(number), list(np.linspace(0.1, 0.5, 120)), config(f"m{number}", 1, 120))
    plot_curves(group_runs(load_runs([tmp_path]).runs)[0], "rounds", tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_of_many_curves_the_highest_have_names(tmp_path: Path):
    for number in range(MOST + 2):
        write_run(tmp_path / str(number), [0.1, 0.2 + number / 100], config(f"m{number}", 1, 2))
    write_run(tmp_path / "usual", [0.1, 0.1], config("fedavg", 1, 2))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    found = [group.method for group in named(groups)]
    assert set(found) == {"fedavg", *(f"m{number}" for number in range(3, MOST + 2))}
    assert found == [group.method for group in groups if group.method in found]
    plot_curves(groups, "rounds", tmp_path / "c.png")


def test_seeds_without_a_common_round_are_no_error(tmp_path: Path):
    write_run(tmp_path / "1", [0.1, None], config("fedavg", 1, 2))
    write_run(tmp_path / "2", [None, 0.1], config("fedavg", 2, 2))
    plot_curves(group_runs(load_runs([tmp_path]).runs)[0], "rounds", tmp_path / "c.png")
    assert (tmp_path / "c.png").exists()


def test_each_method_has_its_own_look():
    groups = [Group(f"m{i}", "", "p", []) for i in range(len(COLOURS) * len(DASHES))]
    assert len(set(map(str, styles(groups).values()))) == len(groups)
