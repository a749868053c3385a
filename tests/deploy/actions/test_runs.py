"""Which run a command means, and with which settings it goes on; tests/faults/test_managed_runs.py has the rest."""

from __future__ import annotations

import contextlib

import pytest

from fedcross.core.errors import ConfigError
from fedcross.core.overrides import join, quote
from fedcross.core.trust.admission import fingerprint
from fedcross.deploy.actions import runs
from fedcross.deploy.nodes import OWN, UNBOUND, Node
from fedcross.engines.runs import Listed
from tests.support.command import subcommand

deploy = subcommand("deploy")
WHERE = ("--superlink", "h:1", "--authority", "ca.crt")


def listed(number: int, status: str, *overrides: str) -> Listed:
    return Listed(number, status, "", f"2026-11-2{number}", join(overrides))


OVER = listed(2, "finished:stopped", "seed=1", "resume='/o/a'", "output='/o/a'")
GOING = listed(3, "running", "output='/o/b c'")


def test_a_run_is_named_by_its_id_or_as_the_last():
    assert runs.chosen([GOING, OVER], "last") is GOING
    assert runs.chosen([GOING, OVER], "2") is OVER
    for known, name in (([GOING, OVER], "7"), ([], "last"), ([GOING], "../x"), ([listed(1, "running")], "")):
        with pytest.raises(ConfigError, match="no such run"):
            runs.chosen(known, name)


def test_a_run_has_the_name_of_its_folder_and_the_newest_in_a_folder_counts():
    again = listed(8, "running", "resume=/o/a")
    assert runs.chosen([again, GOING, OVER], "a") is again
    assert runs.chosen([again, GOING, OVER], "/o/a/") is again
    assert runs.chosen([again, GOING, OVER], "2") is OVER
    assert runs.chosen([again, GOING, OVER], "b c") is GOING
    with pytest.raises(ConfigError, match="runs 9 and 8 have this name, in /p/a and /o/a"):
        runs.chosen([listed(9, "running", "output=/p/a"), again, OVER], "a")
    assert runs.chosen([listed(9, "running", "output=/p/a"), again, OVER], "/o/a") is again


def test_a_run_that_lost_the_race_for_its_folder_does_not_hide_the_one_that_is_on():
    refused = listed(9, "finished:failed", "resume=/o/a")
    on = listed(8, "running", "resume=/o/a")
    for name in ("a", "/o/a"):
        assert runs.chosen([refused, on, OVER], name) is on
        assert runs.chosen([refused, OVER], name) is refused
    assert runs.chosen([refused, on, OVER], "last") is refused
    assert runs.chosen([refused, on, OVER], "9") is refused


def test_a_run_whose_settings_cannot_be_read_does_not_hide_the_others():
    """``flwr run`` takes any text, so that of another program too."""
    foreign = Listed(9, "finished:failed", "", "2026-11-29", "task.file=it's.csv")
    assert (runs.folder(foreign), runs.chosen([foreign, GOING], "b c"), runs.chosen([foreign], "9")) == (
        None, GOING, foreign,
    )  # fmt: skip
    assert runs.continued(OVER, [foreign, OVER], [])[-1] == "resume='/o/a'"
    with pytest.raises(ConfigError, match="no run of fedcross"):
        runs.continued(foreign, [foreign], [])


def test_a_stopped_run_goes_on_with_its_settings_in_its_folder():
    assert runs.continued(OVER, [GOING, OVER], ["rounds=9"]) == [
        "seed=1", "output='/o/a'", "rounds=9", "resume='/o/a'",
    ]  # fmt: skip


def test_a_run_whose_folder_was_moved_goes_on_in_its_new_place():
    assert runs.continued(OVER, [GOING, OVER], ["resume='/n/a'", "rounds=9"]) == ["seed=1", "rounds=9", "resume='/n/a'"]
    with pytest.raises(ConfigError, match="run 3 writes into /o/b c now"):
        runs.continued(OVER, [GOING, OVER], ["resume='/o/b c'"])


def test_only_an_ended_run_with_a_folder_of_its_own_goes_on():
    with pytest.raises(ConfigError, match="Stop it first"):
        runs.continued(GOING, [GOING, OVER], [])
    with pytest.raises(ConfigError, match="run 4 writes into /o/a now"):
        runs.continued(OVER, [listed(4, "starting", "output='/o/a'"), OVER], [])
    with pytest.raises(ConfigError, match="no run of fedcross"):
        runs.continued(listed(1, "finished:failed"), [], [])


@pytest.mark.parametrize("folder", ["/o/a b", "/o/it's", "/o/back\\slash"])
def test_the_folder_is_read_back_from_the_settings(folder):
    assert runs.folder(listed(1, "running", f"output={quote(folder)}")) == folder


@pytest.fixture
def clock(monkeypatch):
    """A clock that passes by sleeping only; returns the moments, from 0."""
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_run_that_has_crashed_is_awaited_until_the_superlink_knows(clock, capsys):
    def listing():
        return [listed(3, "finished:failed" if clock[0] >= 60 else "running", "output='/o/a'"), OVER]

    known = runs.ended(listing, "last")
    assert runs.continued(runs.chosen(known, "last"), known, [])[-1] == "resume='/o/a'"
    assert 60 <= clock[0] <= 62
    assert "run 3: the SuperLink takes it for running" in capsys.readouterr().out


def test_a_run_that_goes_on_is_refused_after_the_time_in_which_a_crash_shows(clock):
    known = runs.ended(lambda: [GOING, OVER], "last")
    assert runs.NOTICED_S <= clock[0] <= runs.NOTICED_S + 2
    with pytest.raises(ConfigError, match="fedcross deploy stop 3"):
        runs.continued(known[0], known, [])


def test_a_run_that_is_over_is_not_awaited_and_another_new_one_is_not_taken_for_it(clock, capsys):
    assert runs.ended(lambda: [OVER], "last") == [OVER]
    assert (clock[0], capsys.readouterr().out) == (0, "")
    runs.ended(
        lambda: [
            *([listed(9, "running")] if clock[0] else []),
            listed(3, "running" if clock[0] < 9 else "finished:failed"),
        ],
        "last",
    )
    assert clock[0] == 10


def test_the_status_names_devices_that_are_away_and_runs_that_are_under_way():
    known = [Node(1, "online", b"a", 0), Node(2, "offline", b"b", 1), Node(3, "registered", b"c", 2)]
    queue = [listed(5, "pending", "output=/o/e"), listed(4, "pending", "output=/o/d")]
    found = [*queue, GOING, OVER, listed(1, "finished:failed")]
    assert runs.summary("fl:8000", known, found) == [
        "SuperLink fl:8000 answers",
        "devices: 3 registered, 1 online",
        f"  offline       {fingerprint(b'b')}  partition 1",
        f"  registered    {fingerprint(b'c')}  partition 2",
        "runs: 1 under way, 2 waiting, 1 failed, 1 stopped",
        "  running       3  /o/b c  since 2026-11-23",
        "  pending       4  /o/d  since 2026-11-24",  # the first to begin
        "  pending       5  /o/e  since 2026-11-25",
    ]


def test_the_status_names_devices_that_get_no_partition_though_they_are_online():
    known = [Node(1, "online", b"a", 0), Node(2, "online", b"b")]
    assert runs.summary("fl:8000", known, [])[1:3] == [
        "devices: 2 registered, 2 online, 1 without a partition",
        f"  online        {fingerprint(b'b')}  {UNBOUND}",
    ]
    assert runs.summary("fl:8000", known[1:], [])[1:3] == ["devices: 1 registered, 1 online", "runs: 0 under way"]
    away = runs.summary("fl:8000", [Node(2, "offline", b"b")], [])
    assert away[2] == f"  offline       {fingerprint(b'b')}  {OWN}"


@pytest.fixture
def link(monkeypatch):
    """A SuperLink that knows two runs; returns what was done with it."""
    done = []
    monkeypatch.setattr(runs, "connect", lambda *where: contextlib.nullcontext("client"))
    monkeypatch.setattr(runs.control, "listing", lambda client: [GOING, OVER])
    monkeypatch.setattr(runs.control, "stop", lambda client, number: done.append(("stop", number)))
    monkeypatch.setattr(runs.control, "so_far", lambda client, number: f"log of {number}\n")
    monkeypatch.setattr(runs.remote, "submit", lambda _, overrides, work, watch: done.append((overrides, watch)) or 9)
    return done


def test_the_four_commands(link, capsys, monkeypatch):
    assert deploy(["runs", *WHERE]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["3", "running"], ["2", "finished:stopped"],
    ]  # fmt: skip
    assert deploy(["stop", "last", *WHERE]) == 0
    assert deploy(["stop", "2", *WHERE]) == 1  # it is over
    assert deploy(["resume", "2", "rounds=9", "--detach", *WHERE]) == 0
    assert link == [("stop", 3), (join(["seed=1", "output='/o/a'", "rounds=9", "resume='/o/a'"]), False)]
    capsys.readouterr()
    assert deploy(["logs", "last", *WHERE]) == 0
    assert capsys.readouterr().out == "log of 3\n"


def test_a_run_that_cannot_be_stopped_keeps_no_other_from_it(link, capsys):
    assert deploy(["stop", "2", "none", "3", *WHERE]) == 1
    assert link == [("stop", 3)]
    said = capsys.readouterr()
    assert "run 3 is stopped" in said.out
    assert "run 2: it is over already" in said.err
    assert "none: the SuperLink knows no such run" in said.err
    assert deploy(["stop", "none", "3", *WHERE]) == 2
    assert link == [("stop", 3)] * 2


def test_settings_may_stand_behind_an_option(link, capsys):
    assert deploy(["resume", "2", *WHERE, "--detach", "rounds=9", "seed=2"]) == 0
    assert link == [(join(["seed=1", "output='/o/a'", "rounds=9", "seed=2", "resume='/o/a'"]), False)]
    for wrong in (["resume", "2", "--detach", "rounds=9", "--sooner", *WHERE], ["runs", *WHERE, "rounds=9"]):
        with pytest.raises(SystemExit):
            deploy(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("finished:completed", 0), ("finished:failed", 1)])
def test_following_a_log_ends_as_the_run_does(link, capsys, monkeypatch, status, code):
    monkeypatch.setattr(runs.control, "follow", lambda client, number, sink: sink("a line") or listed(3, status))
    assert deploy(["logs", "last", "--follow", *WHERE]) == code
    assert capsys.readouterr().out == "a line\n"
