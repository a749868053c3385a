"""Revoked keys stay revoked: whatever becomes of the SuperLink's database, its record of them keeps them out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.error import FlowerError
from flwr.superlink.servicer.control import control_handlers

from fedcross.core.errors import StorageError
from fedcross.core.trust.admission import fingerprint
from fedcross.core.trust.keys import make_node_key
from fedcross.deploy import start
from fedcross.deploy.nodes import read_public_key
from fedcross.engines.executor import barred, recorded
from tests.support.disk import largest_file
from tests.support.link_state import opened

REPLACED = (
    "initialize",
    "delete_node",
    "get_node_info",
    "get_node_id_by_public_key",
    "_check_and_tag_offline_nodes",
)
ACCOUNT: Any = SimpleNamespace(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)


@pytest.fixture(autouse=True)
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACED:  # `attach` replaces them for the whole process
        monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))
    barred.attach()


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], bytes]:
    def made(name: str) -> bytes:
        return read_public_key(make_node_key(tmp_path / "keys", name).public.read_bytes(), name)

    return made


def register(state: Any, key: bytes) -> int:
    return int(control_handlers.register_node(RegisterNodeRequest(public_key=key), ACCOUNT, state).node_id)


def revoke(state: Any, number: int, account: Any = ACCOUNT) -> None:
    control_handlers.unregister_node(UnregisterNodeRequest(node_id=number), account, state)


def statuses(state: Any) -> dict[bytes, str]:
    return {node.public_key: node.status for node in state.get_node_info()}


def place(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(exist_ok=True)
    return folder / "superlink.db"


def copied(file: Path, copy: Path) -> Path:
    """Copy a database whole, in place of another one, as an operator who brings an older one back."""
    for path in copy.parent.glob(f"{copy.name}*"):  # with its log of changes
        path.unlink()
    with contextlib.closing(sqlite3.connect(file)) as now, contextlib.closing(sqlite3.connect(copy)) as then:
        now.backup(then)
    return copy


def test_an_older_database_lets_no_revoked_key_in(
    tmp_path: Path, key: Callable[[str], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    file, thief, honest = place(tmp_path), key("thief"), key("honest")
    state = opened(file)
    number = register(state, thief)
    copy = copied(file, tmp_path / "copy.db")
    revoke(state, number)
    register(state, honest)
    copied(copy, file)
    with caplog.at_level(logging.WARNING):
        state = opened(file)
    assert statuses(state) == {thief: "unregistered"}
    assert not state.activate_node(number, 300.0)
    assert state.get_node_id_by_public_key(thief) is None
    assert f"they are revoked again ({fingerprint(thief)}). Register the devices" in caplog.text
    with pytest.raises(FlowerError, match="Public key already in use"):
        register(state, thief)
    assert register(state, honest)


def test_a_new_database_knows_what_was_revoked_under_another_name_too(
    tmp_path: Path, key: Callable[[str], bytes]
) -> None:
    file, thief = place(tmp_path), key("thief")
    state = opened(file)
    revoke(state, register(state, thief))
    state = opened(file.with_name("new.db"))
    assert statuses(state) == {thief: "unregistered"}
    with pytest.raises(FlowerError, match="Public key already in use"):
        register(state, thief)
    again = opened(file.with_name("new.db"))
    assert statuses(again) == {thief: "unregistered"}


def test_the_record_is_on_the_disk_before_the_database_has_the_key_as_revoked(
    tmp_path: Path, key: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, thief, done = place(tmp_path), key("thief"), []
    state = opened(file)
    number, fsync, replace = register(state, thief), os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append((kind, statuses(state)[thief]))
        fsync(descriptor)

    def named(path: Path, target: Path) -> Path:
        done.append(("name", path.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", named)
    revoke(state, number)
    assert done == [("file", "registered"), ("name", f".{recorded.FILE}.part"), ("folder", "registered")]
    record = file.with_name(recorded.FILE)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    [told] = json.loads(record.read_text())["keys"]
    assert told["fingerprint"] == fingerprint(thief)
    assert [*recorded.read(record)] == [thief]
    assert sorted(path.name for path in file.parent.iterdir() if "revoked" in path.name) == [recorded.FILE]


def test_a_record_that_is_lost_is_made_again_of_the_database(tmp_path: Path, key: Callable[[str], bytes]) -> None:
    file, thief, other = place(tmp_path), key("thief"), key("other")
    record = file.with_name(recorded.FILE)
    state = opened(file)
    register(state, other)
    assert not record.exists()
    revoke(state, register(state, thief))
    record.unlink()
    opened(file)
    assert [*recorded.read(record)] == [thief]


def test_nobody_is_recorded_whom_the_call_does_not_revoke(tmp_path: Path, key: Callable[[str], bytes]) -> None:
    file = place(tmp_path)
    state = opened(file)
    number = register(state, key("honest"))
    for wrong, account in ((number + 1, ACCOUNT), (number, SimpleNamespace(flwr_aid="other", account_name="o"))):
        with pytest.raises(FlowerError, match="not found"):
            revoke(state, wrong, account)
    assert not file.with_name(recorded.FILE).exists()


def test_a_full_disk_keeps_no_key_in_and_is_told(
    tmp_path: Path, key: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, keys = place(tmp_path), [key("a"), key("b")]
    state = opened(file)
    numbers, fsync = [register(state, one) for one in keys], os.fsync

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HTTPException, match=r"507: revoked, but revoked-keys\.json cannot be written \(No space left"):
        revoke(state, numbers[0])
    assert statuses(state)[keys[0]] == "unregistered"
    monkeypatch.setattr(os, "fsync", fsync)
    revoke(state, numbers[1])
    assert {*recorded.read(file.with_name(recorded.FILE))} == {*keys}  # the first one too


@pytest.mark.parametrize("content", [b"", b"junk", b"[]", b'{"keys": [{"key": "?"}]}', b'{"keys": 1}', b"\xff"])
def test_a_damaged_record_starts_nothing(tmp_path: Path, content: bytes) -> None:
    file = place(tmp_path)
    file.with_name(recorded.FILE).write_bytes(content)
    with pytest.raises(SystemExit, match=r"revoked-keys\.json: no readable record of revoked keys .* newest copy back"):
        opened(file)


def test_what_another_one_has_recorded_there_stays(tmp_path: Path) -> None:
    path = tmp_path / recorded.FILE
    one, other = recorded.Record(path), recorded.Record(path)
    one.add([b"a"])
    other.add([b"b"])
    assert {*recorded.read(path)} == {b"a", b"b"}
    path.unlink()
    other.add([b"c"])
    assert {*recorded.read(path)} == {b"a", b"b", b"c"}


def test_a_link_stays_one(tmp_path: Path, key: Callable[[str], bytes]) -> None:
    file, elsewhere = place(tmp_path), tmp_path / "kept.json"
    file.with_name(recorded.FILE).symlink_to(elsewhere)
    elsewhere.write_text('{"keys": []}')
    state = opened(file)
    revoke(state, register(state, key("thief")))
    assert file.with_name(recorded.FILE).is_symlink()
    assert len(recorded.read(elsewhere)) == 1


def test_a_state_in_memory_has_no_record(
    tmp_path: Path, key: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = opened(None)
    revoke(state, register(state, key("thief")))
    assert not [*tmp_path.rglob(recorded.FILE)]


def test_a_record_on_a_disk_that_is_away_starts_nothing(tmp_path: Path, key: Callable[[str], bytes]) -> None:
    """A new database without it would let in what was revoked."""
    file, disk = place(tmp_path), tmp_path / "disk"
    disk.mkdir()
    record = file.with_name(recorded.FILE)
    state = opened(file)
    revoke(state, register(state, key("thief")))
    record.rename(disk / "keys.json")
    record.symlink_to(disk / "keys.json")
    disk.rename(tmp_path / "away")
    file.unlink()
    says = rf"revoked-keys\.json: a link to {disk}/keys\.json, which is not there, .* Is its disk mounted\?"
    with pytest.raises(SystemExit, match=says) as error:
        opened(file)
    with pytest.raises(StorageError, match=says):
        start.check_database(file)
    disk.mkdir()
    subprocess.run(str(error.value).split("was one: ")[1], shell=True, check=True)
    assert recorded.read(record) == {}


@pytest.mark.parametrize(("root", "whose"), [(True, "folder"), (True, "database"), (False, None)])
def test_what_root_writes_belongs_to_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool, whose: str | None
) -> None:
    folder, database, given = place(tmp_path).parent, place(tmp_path), []
    database.touch()
    found = Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        fields = list(found(path, **options))
        if path == folder:
            fields[4:6] = [10001, 10001]
        if path == database:
            fields[4:6] = [10002, 10002] if whose == "database" else [0, 0]
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 10001)
    monkeypatch.setattr(os, "fchown", lambda _, *owner: given.append(owner))
    recorded.Record(folder / recorded.FILE, database).add([b"a"])
    assert given == {"folder": [(10001, 10001)], "database": [(10002, 10002)], None: []}[whose]


def test_a_record_of_another_owner_than_its_folder_has_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root has run the SuperLink once."""
    path, found = tmp_path / recorded.FILE, Path.stat
    recorded.Record(path).add([b"a"])

    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    def owned(path: Path, **options: bool) -> os.stat_result:
        fields = list(found(path, **options))
        fields[4:6] = [10001 if path == tmp_path else 0] * 2
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ValueError, match=r"Permission denied\).* Run as the owner of the SuperLink's database"):
        recorded.read(path)
    monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(ValueError, match=rf"User 0 owns it, and user 10001 its folder: chown 10001:10001 {path}$"):
        recorded.read(path)


def test_on_a_full_disk_the_record_in_memory_keeps_the_key_out(tmp_path: Path, key: Callable[[str], bytes]) -> None:
    file, thief = place(tmp_path), key("thief")
    state = opened(file)
    number = register(state, thief)
    assert state.activate_node(number, 0.001)
    assert state.get_node_id_by_public_key(thief) == number
    time.sleep(0.01)  # it is away: whoever lists the nodes writes that down
    with largest_file(0):
        assert control_handlers.list_nodes(ListNodesRequest(), ACCOUNT, state).nodes_info
        with pytest.raises(HTTPException, match=r"507: shut out, but the database cannot be written .* revoke the key"):
            revoke(state, number)
        assert state.get_node_id_by_public_key(thief) is None  # with which the SuperLink compares each call's node
    assert state.get_node_id_by_public_key(thief) is None
    assert statuses(state)[thief] != "unregistered"
    revoke(state, number)
    assert statuses(state) == {thief: "unregistered"}
    assert [*recorded.read(file.with_name(recorded.FILE))] == [thief]


@pytest.mark.parametrize("mode", [0o666, 0o660])
def test_a_record_that_others_can_write_starts_nothing(tmp_path: Path, mode: int) -> None:
    path = tmp_path / recorded.FILE
    recorded.Record(path).add([b"a"])
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"mode {mode:o}, so others .* Close it: chmod 600 {path}\n"):
        recorded.Record(path)
    path.chmod(0o644)
    assert [*recorded.Record(path)] == [b"a"]


def test_what_is_said_of_a_record_that_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / recorded.FILE
    path.mkdir()
    with pytest.raises(ValueError, match="It is a folder: move that away"):
        recorded.read(path)
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(ValueError, match="It is a link that leads in a circle"):
        recorded.read(path)
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="no readable record of revoked keys"):
        recorded.read(path)


def test_a_part_that_another_user_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / recorded.FILE
    path.with_name(f".{recorded.FILE}.part").symlink_to(tmp_path / "x")  # as one that cannot be opened
    recorded.Record(path).add([b"a"])
    assert [*recorded.read(path)] == [b"a"]
    assert not (tmp_path / "x").exists()
