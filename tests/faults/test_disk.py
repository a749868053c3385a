"""A disk that really is full, at the checkpoint and at the log of replies: an error, never a hang, nothing lost."""

import pytest

from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import Checkpoints
from tests.support.disk import can_mount, filled, largest_file, small_disk
from tests.support.federation import run, same, session

pytestmark = pytest.mark.slow
LONG = ("rounds=4", "model.hidden=[300]", "evaluate_every=4")  # 23,000 weights, a pool of three: 0.27 MB


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The final model of an undisturbed run."""
    return run(tmp_path_factory.mktemp("whole"), *LONG).driver.global_model()


def check(folder, reference, broken, *overrides):
    """Do two rounds, fail inside `broken`, resume, and compare."""
    run(folder, *LONG, "rounds=2", *overrides)
    resumed = session(folder, *LONG, *overrides, f"resume={folder}")
    with broken, pytest.raises(StorageError, match=r"cannot be written.*then resume"):
        resumed.execute()
    assert Checkpoints(folder).latest()[0] == 2
    again = session(folder, *LONG, *overrides, f"resume={folder}")
    assert again.done == 2
    again.execute()
    assert same(again.driver.global_model(), reference)


@pytest.mark.parametrize("log", ["true", "false"])
def test_a_file_that_may_not_grow(tmp_path, reference, log):
    """A write stops in the middle of a checkpoint of 0.27 MB, or of the log's second reply."""
    check(tmp_path, reference, largest_file(100_000), f"checkpoint.log={log}")


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a file system (root)")
@pytest.mark.parametrize("log", ["true", "false"])
def test_a_full_file_system(tmp_path, reference, log):
    with small_disk(tmp_path / "disk", "8m") as disk:
        check(disk / "run", reference, filled(disk), f"checkpoint.log={log}")
