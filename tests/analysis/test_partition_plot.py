"""``fedcross partition``: counts, tables, plot and errors."""

import numpy as np
import pytest

from fedcross.analysis.partition_plot import bubble_plot, counts, markdown, rows, sizes
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.reading.params import token_ids
from tests.support.command import subcommand

main = subcommand("partition")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_counts_and_sizes_by_hand():
    y = np.array([0, 0, 1, 2, 2, 2])
    nothing = Examples(np.zeros((1, 1)), np.zeros(1, np.int64))
    task = Task("toy", Examples(np.zeros((6, 1)), y), nothing, 3, (1,), token_ids)
    table = counts(task, Partition(train=[np.array([0, 2]), np.array([1]), np.array([3, 4, 5])]))
    assert table.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 3]]
    assert sizes(table) == (1, 2.0, 3)


def test_rows_leave_zeros_out_and_shorten_many_classes():
    header, body = rows(np.array([[3, 0], [1, 2]]), ["even", "odd"])
    assert header == ["client", "examples", "even", "odd"]
    assert body == [["0", "3", "3", ""], ["1", "3", "1", "2"]]
    assert markdown(header, body).splitlines()[1:3] == ["| ---: | ---: | ---: | ---: |", "| 0 | 3 | 3 |  |"]
    wide = np.zeros((1, 30), np.int64)
    wide[0, [4, 7]] = 3, 1
    assert rows(wide, ())[1] == [["0", "4", "2", "0.75"]]


def test_command_prints_table_and_summary(capsys):
    assert main(["task=digits", "partition=iid", "partition.clients=4", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digits, iid (clients 4)\n\n| client | examples | 0 | 1 |")
    assert (
        "4 clients, 1438 examples; smallest 359, median 359.5, largest 360; classes per client: median 10 of 10" in out
    )


@pytest.mark.slow
def test_command_draws_and_terminal_table(tmp_path, capsys):
    file = tmp_path / "plot.png"
    assert main(["task=digits", "--plot", str(file), "partition.clients=8", "partition.min_size=2"]) == 0
    assert "smallest" in capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG")


def test_command_over_seeds(capsys):
    assert main(["task=digits", "partition.clients=8", "--seeds", "3", "--markdown"]) == 0
    out = capsys.readouterr().out
    lines = [line.split("|") for line in out.splitlines() if "client |" in line]
    for _, name, mean, lowest, highest, _ in lines:
        assert float(lowest) <= float(mean) <= float(highest), name
    assert len(lines) == 3
    # half of 1438 examples over 8 clients cannot be outside these
    assert 10 <= float(lines[0][3]) < 1438 / 8 < float(lines[2][4])


def test_bubble_area_is_proportional(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    drawn = {}
    original = Axes.scatter

    def scatter(self, x, y, s, **rest):
        drawn.update(x=list(x), y=list(y), s=s)
        return original(self, x, y, s=s, **rest)

    monkeypatch.setattr(Axes, "scatter", scatter)
    bubble_plot(np.array([[10, 0], [5, 40]]), (), "toy", tmp_path / "a.svg")
    assert (drawn["x"], drawn["y"]) == ([0, 1, 1], [0, 0, 1])
    assert drawn["s"] / drawn["s"][2] == pytest.approx([0.25, 0.125, 1.0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["partition.beta=-1"], "partition.beta=-1"),
        (["partition=dirichle"], "Did you mean 'dirichlet'"),
        (["task=mnist", "data_root=/nowhere"], "MNIST: missing /nowhere/MNIST"),
        (["partition.clients=1000"], "1000 clients with at least 10 examples each need 10000, but there are 1438"),
        (["--seeds", "0"], "--seeds 0"),
        (["--plot", "a.doc", "partition=iid"], "Use .png, .pdf or .svg"),
        (["--plot", "/nowhere/a.png", "partition=iid"], "/nowhere/a.png: there is no folder /nowhere"),
    ],
)
def test_faults_exit_with_2(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
