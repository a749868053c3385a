"""Some of the faults of ``python -m tests.faults.injections``, each in a real process; the command does them all.

Those that need torch are forked from a process that has imported it (tests.support.warm).
"""

import os

import pytest

from fedcross.core.causes import CAUSES
from tests.faults.healthy import alarms
from tests.faults.injected_federation import FEDERATION, shared
from tests.faults.injected_here import HERE
from tests.support.disk import can_mount
from tests.support.injection import EXIT, LIMIT_S, Bench, Told

#: Two commands that start in a second.
CHEAP = ("no_checkpoint", "open_key")
#: Each is one start of a process of its own.
ONE_PROCESS = ("folder_unwritable", "certificate_expired", "wrong_server_name", "clock_off", "wrong_version", "no_gpu")
SEVERAL = ("checkpoint_unwritable", "folder_in_use", "audit_changed", "clients_refuse", "missing_program")


def check(how, name, folder, warm=False):
    with Bench(folder / name, warm=warm) as bench:
        told = how[name](bench)
    # The time is for the table; a test on a machine that does other work besides cannot promise it.
    assert (told.names, told.code) == ((name,), EXIT[name]), told.text


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_a_fault_in_a_real_process_is_named(name, tmp_path):
    check(HERE, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_PROCESS, *SEVERAL])
def test_a_fault_in_real_processes_is_named(name, tmp_path):
    check(HERE, name, tmp_path, warm=True)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a disk of its own")
def test_a_full_disk_is_named(tmp_path):
    check(HERE, "disk_full", tmp_path, warm=True)


@pytest.mark.slow
@pytest.mark.superlink
@pytest.mark.usefixtures("warm_start")
def test_faults_of_a_federation_are_named(tmp_path):
    with shared(tmp_path / "network"):
        for name in ("key_bound", "no_clients", "wrong_shapes"):
            check(FEDERATION, name, tmp_path, warm=True)


def test_the_injections_are_of_the_table_and_enough():
    assert not {*HERE} & {*FEDERATION}
    assert {*HERE, *FEDERATION} <= {cause.name for cause in CAUSES}
    assert len(HERE) + len(FEDERATION) >= 30


def test_alarms_are_found_and_what_a_healthy_run_says_is_none():
    healthy = [
        '{"event": "round_finished", "round": 3, "dropped": 0}',
        '{"event": "flower", "level": "INFO", "text": "Start"}',
        "Reading digits ...",
    ]
    alarming = [
        '{"event": "slot_lost", "slot": 3, "reason": "lost"}',
        '{"event": "message", "level": "WARNING", "text": "fedcross: something"}',
        '{"event": "flower", "level": "INFO", "text": "0 clients are connected after 4 s"}',
        "OSError: [Errno 28] No space left on device",
    ]
    assert alarms([*healthy, *alarming]) == alarming


def test_a_wrong_a_late_and_a_second_name_do_not_count():
    right = Told(("no_data",), 1.0, 1, "")
    assert right.right("no_data")
    assert not right.right("port_taken")
    assert not Told(("no_data", "disk_full"), 1.0, 1, "").right("no_data")
    assert not Told(("no_data",), LIMIT_S + 1, 1, "").right("no_data")
    assert not Told(("no_data",), 1.0, 0, "").right("no_data")
    assert not Told((), 1.0, 1, os.devnull).right("no_data")
