"""The table of causes against what the code really says: faults are made here, in this process, where that is cheap."""

import errno
import os
import re
import socket
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from fedcross.core.causes import CAUSES, PAGE, cause_of
from fedcross.core.errors import FedcrossError
from fedcross.core.private_files import check_private
from fedcross.core.trust.certificates import check_certificate
from fedcross.core.trust.signing import make_authority, make_server
from fedcross.engines import flower, memory, remote
from fedcross.server import accounting, audit, identity, run_folder
from fedcross.server.commands import device_checks, doctor
from fedcross.server.commands.main import main
from fedcross.strategies.round.client_faults import end_if_common
from fedcross.strategies.round.nodes import Nodes
from tests.conftest import ROOT

NAMES = {cause.name: cause for cause in CAUSES}


def test_the_table_is_sound():
    assert len(CAUSES) == len(NAMES) >= 30
    assert {cause.exit_code for cause in CAUSES} == {0, 1, 2}
    assert all(re.fullmatch(r"[a-z_]+", name) for name in NAMES)


@pytest.mark.parametrize("cause", [one for one in CAUSES if one.source], ids=lambda one: one.name)
def test_the_file_still_says_it(cause):
    text = re.sub(r"\"\s*\n\s*f?\"", "", (ROOT / cause.source).read_text())  # literals that continue each other
    said = re.sub(r"\{[^{}]*\}", "0", text)
    assert re.search(cause.words, said) or re.search(cause.words, text)


def server(folder, authority, **days):
    return make_server(authority, folder, ["localhost"], **days).public


def expired(folder):
    authority = make_authority(folder / "ca")
    old = server(folder / "s", authority, days=1, now=datetime.now(UTC) - timedelta(days=3))
    check_certificate(old, authority.public)


def early(folder):
    authority = make_authority(folder / "ca")
    check_certificate(server(folder / "s", authority, now=datetime.now(UTC) + timedelta(days=3)), authority.public)


def foreign(folder):
    mine, theirs = make_authority(folder / "a"), make_authority(folder / "b")
    check_certificate(server(folder / "s", theirs), mine.public)


def full(number):
    def fault(folder, monkeypatch):
        def write(_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", write)
        trail = audit.Audit(folder, "r", "s")
        trail.flush()

    return fault


def busy(folder):
    with run_folder.claimed(folder), run_folder.claimed(folder):
        pass


def used(folder):
    (folder / "metrics.jsonl").touch()
    run_folder.refuse_used(folder)


def changed(folder):
    (folder / audit.NAME).write_text("{}\n")
    audit.Audit(folder, "r", "s", audit.Head(0, "x"), 3)


def connected(count):
    def fault(_):
        grid = SimpleNamespace(get_node_ids=lambda: range(count))
        nodes = Nodes()
        nodes._partition_of = {node: node for node in range(count)}
        nodes.wait_for(grid, 5, 0.0)

    return fault


def idle(reason):
    lines = [{"clients": 3, "dropped": 3, "rejected": {reason: 3} if reason else {}}]
    return lambda _: accounting.refuse_idle(lines)


@pytest.mark.parametrize(("taken", "idle"), [({}, True), ({"bytes_up": 8}, False), ({"train_loss": 0.0}, False)])
def test_slots_that_were_asked_for_twice_do_not_hide_that_nothing_was_trained(taken, idle):
    lines = [{"clients": 6, "dropped": 3, "rejected": {"too_large": 6}}, {"clients": 6, "dropped": 3, **taken}]
    if idle:
        with pytest.raises(FedcrossError) as caught:
            accounting.refuse_idle(lines)
        assert cause_of(str(caught.value)) is NAMES["wrong_shapes"]
    else:
        accounting.refuse_idle(lines)


def readable(folder):
    (folder / "node.key").touch(mode=0o644)
    (folder / "node.key").chmod(0o644)
    check_private(folder / "node.key")


def away(folder):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    remote.wait_for(f"127.0.0.1:{port}", make_authority(folder / "ca").public, 0.1)


RAISED = {
    "folder_in_use": busy,
    "folder_used": used,
    "no_checkpoint": run_folder.saved_overrides,
    "other_settings": lambda _: identity.check_same({"a": 1}, {"a": 2}),
    "audit_changed": changed,
    "no_clients": connected(0),
    "too_few_clients": connected(2),
    "clients_refuse": lambda _: end_if_common({1: "no model", 2: "no model"}, {1, 2}, 1, 2, heard=False, said=set()),
    "wrong_shapes": idle("wrong_shape"),
    "nothing_trained": idle(""),
    "certificate_expired": expired,
    "certificate_early": early,
    "wrong_authority": foreign,
    "open_key": readable,
    "superlink_away": away,
    "missing_program": lambda _: flower.executable("no-such-program"),
}


@pytest.mark.parametrize("name", RAISED)
def test_a_fault_is_named_and_ends_with_its_exit_code(name, tmp_path):
    with pytest.raises(FedcrossError) as caught:
        RAISED[name](tmp_path)
    assert cause_of(str(caught.value)) is NAMES[name]
    assert caught.value.exit_code == NAMES[name].exit_code


@pytest.mark.parametrize(
    ("name", "number"), [("disk_full", errno.ENOSPC), ("quota_exceeded", errno.EDQUOT), ("read_only", errno.EROFS)]
)
def test_a_disk_that_takes_no_more(name, number, tmp_path, monkeypatch):
    with pytest.raises(FedcrossError) as caught:
        full(number)(tmp_path, monkeypatch)
    assert (cause_of(str(caught.value)), caught.value.exit_code) == (NAMES[name], 2)


def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        return doctor.check_listen(other.getsockname()[1], "127.0.0.1")


def unreachable():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    return doctor.check_connect(address)


FOUND = {
    "port_taken": taken,
    "no_connection": unreachable,
    "clock_off": lambda: next(iter(device_checks.check_clock("Sun, 22 Nov 2026 06:00:00 GMT", 0.0))),
    "no_data": lambda: next(iter(doctor.check_data(ROOT / "not-there", required=True))),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_that_doctor_finds_is_named(name):
    finding = FOUND[name]()
    assert finding.kind == "FAULT"
    assert cause_of(finding.text) is NAMES[name]


@pytest.mark.parametrize(
    "settings",
    [
        ["task=table", "task.file=none.csv", "task.label=kind"],
        ["task=cifar10"],
        ["task=folder", "task.root=none"],
        ["task=dataset", "task.root=none"],
        ["task=digits", "partition=indices", "partition.file=none.json"],
    ],
    ids=lambda settings: " ".join(settings[:1] + settings[-1:]),
)
def test_a_run_whose_data_are_not_there_names_that(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*settings, "data_root=.", "output=run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Cause: data_missing ({PAGE})"


@pytest.mark.parametrize(
    "said",
    [
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
        "Port in server address 127.0.0.1:9100 is already in use.",
    ],
)
def test_a_taken_port_is_known_in_the_words_of_flower_and_asyncio(said):
    assert cause_of(said) is NAMES["port_taken"]


def test_the_loader_of_libraries_knows_a_lack_of_memory_in_words_of_its_own():
    said = "ImportError: libtorch_cpu.so: failed to map segment from shared object"
    assert cause_of(said) is NAMES["out_of_memory"]
    assert cause_of(f"{said}: Operation not permitted") is None  # a folder from which nothing may be run


@pytest.mark.parametrize("place", ["{tmp}/out of memory", "No space left on device", "a=b/no such data folder/run"])
def test_what_the_user_called_a_folder_is_no_cause(place, tmp_path, monkeypatch, capsys):
    place = place.format(tmp=tmp_path)
    assert main(["task=digits", f"resume='{place}'"]) == 2
    said = capsys.readouterr().err
    assert place in said
    assert "Cause" not in said
    (tmp_path / "MemoryError").mkdir()
    monkeypatch.chdir(tmp_path / "MemoryError")
    assert cause_of(f"{tmp_path}/MemoryError/x: no such run folder") is None
    assert cause_of(f"{tmp_path}/MemoryError/x: [Errno 12] Cannot allocate memory") is NAMES["out_of_memory"]


def test_a_server_that_is_lost_lacks_memory_only_where_something_says_so(monkeypatch):
    before = memory.kills()
    assert cause_of(memory.end_of("No heartbeat received", before)) is NAMES["serverapp_lost"]
    monkeypatch.setattr(memory, "kills", lambda: before + 1)
    assert cause_of(memory.end_of("No heartbeat received", before)) is NAMES["out_of_memory"]


def test_the_command_names_the_cause(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    assert main(["task=digits", f"output={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Cause: folder_used ({PAGE})"
    assert doctor.main(["--data", str(tmp_path / "none"), "--output", str(tmp_path)]) == 1
    assert "no_data" in next(one for one in capsys.readouterr().out.splitlines() if one.startswith("Causes: "))


def test_an_error_that_nobody_foresaw_keeps_its_traceback_and_names_its_cause(capsys, monkeypatch):
    def exhausted(_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3600000000 bytes.")

    monkeypatch.setattr("fedcross.server.commands.run.main", exhausted)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        main(["task=digits"])
    assert capsys.readouterr().err == f"Cause: out_of_memory ({PAGE})\n"


def test_what_a_healthy_run_says_has_no_cause():
    told = [
        "fedcross digits  round 3/4  accuracy 66.30 %  1 of 6 clients lost",
        "Reading digits ...",
        "Finished: 4 rounds",
    ]
    assert [cause_of(text) for text in told] == [None] * 3
