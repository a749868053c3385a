import pytest

from fedcross.engines import memory


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return the counters of a control group."""
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(memory, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    return tmp_path / "a" / "b" / "memory.events"


def test_the_group_s_own_counter_counts(group, tmp_path):
    assert memory.kills() == 0  # nobody counts
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 1\n")  # in a container the group is the root
    assert memory.kills() == 1
    group.write_text("low 0\noom 5\noom_kill 3\noom_group_kill 0\n")
    assert memory.kills() == 3
    (tmp_path / "cgroup").write_text("12:memory:/x\n")
    assert memory.kills() == 0


def test_a_run_that_ended_for_lack_of_memory_is_said_to_have(group):
    group.write_text("oom_kill 4\n")
    assert "killed 3 processes" in memory.end_of("", 1)
    assert "out of memory" in memory.end_of("", 1)
    lost = memory.end_of("No heartbeat received from the task", 4)
    assert "process ended" in lost
    assert "out of memory" not in lost
    assert "process ended" in memory.end_of("Task failed with unknown error.", 4)
    assert memory.end_of("ServerApp failed with exception: no such run folder", 4) == ""
