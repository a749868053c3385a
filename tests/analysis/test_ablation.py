"""The grid of alpha and selection."""

from pathlib import Path

import numpy as np
import pytest

from fedcross.analysis.ablation import grids, plot_grids
from fedcross.analysis.groups import group_runs
from fedcross.analysis.loading import load_runs
from fedcross.analysis.tables import ablation_tables
from tests.support.fake import config, write_run


@pytest.mark.slow
def test_cells_are_means_over_seeds(tmp_path: Path):
    cells = [(0.5, "in_order", 1, 0.2), (0.5, "in_order", 2, 0.4), (0.9, "in_order", 1, 0.5), (0.9, "lowest", 1, 0.6)]
    for number, (alpha, selection, seed, value) in enumerate(cells):
        values = config("fedcross", seed, 1, method__alpha=alpha, method__selection=selection)
        write_run(tmp_path / str(number), [value], values)
    (grid,) = grids(group_runs(load_runs([tmp_path]).runs)[0])
    assert (grid.alphas, grid.selections) == ([0.5, 0.9], ["in_order", "lowest"])
    np.testing.assert_allclose(grid.values, [[0.3, np.nan], [0.5, 0.6]])
    assert grid.seeds.tolist() == [[2, 0], [1, 1]]
    (table,) = ablation_tables([grid])
    assert list(table.rows) == [("0.5", "30.00 (n=2)", "–"), ("0.9", "50.00 (n=1)", "60.00 (n=1)")]
    plot_grids([grid], tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_one_row_or_column_is_no_grid(tmp_path: Path):
    for number, alpha in enumerate((0.5, 0.9)):
        write_run(tmp_path / str(number), [0.1], config("fedcross", 1, 1, method__alpha=alpha))
    write_run(tmp_path / "a", [0.1], config("fedavg", 1, 1))
    assert grids(group_runs(load_runs([tmp_path]).runs)[0]) == []


def test_other_settings_make_another_grid(tmp_path: Path):
    number = 0
    for lr in (0.01, 0.1):
        for alpha in (0.5, 0.9):
            for selection in ("in_order", "lowest"):
                values = config("fedcross", 1, 1, method__alpha=alpha, method__selection=selection, train__lr=lr)
                write_run(tmp_path / str(number), [0.1 * lr + 0.1 * alpha], values)
                number += 1
    assert len(grids(group_runs(load_runs([tmp_path]).runs)[0])) == 2
