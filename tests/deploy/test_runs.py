import pytest

from fedcross.core.errors import ConfigError
from fedcross.deploy.control import REVOKED, Node
from fedcross.deploy.runs import chosen, continued, folder, summary
from fedcross.engines.runs import Listed


def run(number, status="finished:failed", overrides="rounds=5 output=/outputs/a"):
    return Listed(number, status, "", f"2026-11-28T10:00:{number:02}", overrides)


def test_a_run_goes_on_with_its_settings_in_its_folder():
    first = run(1, overrides="rounds=5 output=/outputs/a resume=/outputs/a")
    assert continued(first, [first], ["rounds=9"]) == [
        "rounds=5",
        "output=/outputs/a",
        "rounds=9",
        "resume='/outputs/a'",
    ]


def test_no_second_run_goes_into_a_folder():
    first, second = run(1), run(2, "running")
    for name in (first, second):
        with pytest.raises(ConfigError, match="run 2: it is running"):
            continued(name, [second, first], [])


def test_a_run_of_another_app_has_no_folder():
    other = run(1, overrides='x="')
    assert folder(other) is None
    with pytest.raises(ConfigError, match="no run of fedcross"):
        continued(other, [other], [])


def test_names_of_runs():
    known = [run(3, overrides="output=/outputs/b"), run(2, "running"), run(1)]
    assert [chosen(known, name).run_id for name in ("last", "1", "a", "/outputs/a", "b")] == [3, 1, 2, 2, 3]
    assert chosen([run(4), run(2, "running")], "a").run_id == 2  # one that is under way before a newer one that ended
    with pytest.raises(ConfigError, match="no such run"):
        chosen(known, "c")
    with pytest.raises(ConfigError, match="no such run"):
        chosen([], "last")
    with pytest.raises(ConfigError, match="different folders"):
        chosen([run(1), run(2, overrides="output=/other/a")], "a")


def test_status_names_devices_that_are_away_and_runs():
    nodes = [Node(1, "online", b"a", 1), Node(2, "offline", b"b", 0), Node(3, REVOKED, b"c", 2)]
    text = "\n".join(summary("superlink:8000", nodes, [run(2, "running"), run(1)]))
    assert "2 registered, 1 online, 1 revoked" in text
    assert text.index("partition 0") < text.index("partition 1")
    assert "offline" in text
    assert "1 under way, 1 failed" in text
    assert "/outputs/a" in text
    many = "\n".join(summary("superlink:8000", [], [run(number) for number in range(12, 0, -1)]))
    assert ("12 failed" in many, "10:00:03" in many, "10:00:02" in many) == (True, True, False)  # ten, the newest
