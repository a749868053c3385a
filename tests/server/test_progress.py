"""The live bar in terminals of any width, with rich's own layout."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fedcross.server.progress import Bar, Lines, fitting

ENTRY: dict[str, Any] = {
    "round": 26,
    "test_accuracy": 0.6212,
    "pool_similarity_mean": 0.99,
    "dropped": 0,
    "clients": 10,
}
ROUND, TIME = "26/300", "-:--:--"


def shown(width: int, title: str, entry: dict[str, Any], total: int = 300) -> str:
    """Return the line that the bar has after `entry` in a terminal of `width` columns."""
    bar = Bar()
    screen = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    bar._bar.live.console = screen
    bar.start(title, 0, total)
    bar.round(entry)
    bar.stop()
    with screen.capture() as text:
        screen.print(bar._bar.make_tasks_table(bar._bar.tasks))
    (line,) = text.get().splitlines()
    return line


@pytest.mark.parametrize("title", ["fedavg digits", "fedcross digits", "fedcross_three_sizes cifar100_coarse"])
@pytest.mark.parametrize("width", [50, 60, 70, 80, 100, 132, 200])
def test_round_accuracy_and_time_are_whole_at_every_width(width: int, title: str) -> None:
    line = shown(width, title, ENTRY)
    assert len(line) <= width
    for part in (title[:4], ROUND, "accuracy 62.12 %", TIME):
        assert part in line
    assert shown(width, title, {**ENTRY, "round": 7000}, 10000).count("7000/10000") == 1


def test_pool_similarity_goes_first_then_the_bar_then_the_end_of_the_title() -> None:
    title = "fedcross_three_sizes digits"
    found = [fitting(width, title, 300, ENTRY) for width in (120, 100, 80, 50)]
    assert [line for _, line, _ in found] == [True, True, False, False]
    assert ["pool similarity" in state for *_, state in found] == [True, False, False, False]
    assert [name == title for name, *_ in found] == [True, True, True, False]
    assert found[-1][0].endswith("…")


def test_lost_clients_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.start("fedavg digits", 0, 300)
    lines.round({**ENTRY, "dropped": 2})
    expected = "fedavg digits  round 26/300  accuracy 62.12 %  pool similarity 0.990  2 of 10 clients lost\n"
    assert capsys.readouterr().out == expected
