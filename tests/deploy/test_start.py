"""How the programs of a federation are started, and what keeps them from it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.trust.signing import make_authority
from fedcross.deploy import federation, gateway, start
from fedcross.deploy.actions import programs
from fedcross.engines import guarded
from fedcross.engines.executor import operators, program, recorded
from tests.deploy.test_authorities import days_ago
from tests.support.command import subcommand

deploy = subcommand("deploy")
DEVICES = ["client-1", "client-2"]


def test_the_superlink_refuses_an_open_token_and_says_what_is_open_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    federation.prepare(tmp_path, [])
    file = tmp_path / "operator" / "token"

    def begin() -> None:
        start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / "state.db", "0.0.0.0")

    monkeypatch.delenv(operators.VARIABLE, raising=False)
    begin()
    assert f"{operators.VARIABLE} is not set: who reaches this port can start and stop runs" in capsys.readouterr().err
    monkeypatch.setenv(operators.VARIABLE, str(file))
    begin()
    assert operators.VARIABLE not in capsys.readouterr().err
    file.chmod(0o644)
    with pytest.raises(StorageError, match="token"):
        begin()


def test_the_superlink_takes_devices_from_the_gateway_alone_and_says_so_if_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation.prepare(tmp_path, [])
    server, file = tmp_path / "server", tmp_path / "server" / "gateway.token"
    assert start.gateway_of(server) == {guarded.GATEWAY: str(file)}
    assert operators.token({guarded.GATEWAY: str(file)}, guarded.GATEWAY) == file.read_text()
    assert capsys.readouterr().err == ""
    file.chmod(0o640)
    with pytest.raises(StorageError, match=r"gateway\.token"):
        start.gateway_of(server)
    file.unlink()
    assert start.gateway_of(server) == {}
    assert f"{file} is missing: who reaches this port can call as a device" in capsys.readouterr().err
    assert federation.prepare(tmp_path, []) == [str(file)]  # a federation of an earlier version gets one


def test_start_commands_use_these_files_and_refuse_open_ones(tmp_path: Path) -> None:
    federation.prepare(tmp_path, DEVICES)
    server, secret, device = tmp_path / "server", tmp_path / "superexec", tmp_path / "client-1"
    superlink = start.superlink(server, secret, tmp_path / "state.db", "0.0.0.0")
    assert superlink[1:4] == ["-m", "fedcross.deploy.patience", "flower-superlink"]
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(superlink)
    assert superlink[superlink.index("--isolation") + 1] == "process"
    assert superlink[superlink.index("--superexec-auth-secret-file") + 1] == str(secret / "superexec.key")
    superexec = start.superexec(secret, "superlink:8000", "127.0.0.1:9100")
    assert superexec[:4] == guarded.command("flower-superexec")
    assert str(secret / "ca.crt") in superexec
    node = start.supernode(device, "client-1", "gateway:8443", 1, 2, 9094)
    assert node[node.index("--node-config") + 1] == "partition-id=1 num-partitions=2"
    assert node[node.index("--isolation") + 1] == "process"
    assert "--insecure" not in [*superlink, *superexec, *node]
    own = str(device / "superexec.key")
    supervisor, node = node[: node.index("--")], node[node.index("--") + 1 :]
    assert supervisor == [*program.command("supervisor"), "--port", "9094", "--secret", own]
    assert node[0] == "flower-supernode"
    assert node[node.index("--port") + 1] == "9094"
    assert node[node.index("--superexec-auth-secret-file") + 1] == own
    contents = {(tmp_path / name / "superexec.key").read_bytes() for name in ("superexec", *DEVICES)}
    assert len(contents) == 1 + len(DEVICES)
    with pytest.raises(StorageError, match="numbered 0 to 1"):
        start.supernode(device, "client-1", "gateway:8443", 2, 2, 9094)
    with pytest.raises(ConfigError, match="--partition 1000000000: give a number from 0 to 999999999"):
        start.supernode(device, "client-1", "gateway:8443", 10**9, 10**10, 9094)
    narrow = start.supernode(device, "client-1", "gateway:8443", 1, 2, 9094, 0.4)
    assert narrow[-1] == "partition-id=1 num-partitions=2 device.width=0.4"
    with pytest.raises(ConfigError, match="--width 1"):
        start.supernode(device, "client-1", "gateway:8443", 1, 2, 9094, 1.5)
    for folder, file, call in (
        (server, "server.key", lambda: start.superlink(server, secret, tmp_path / "s.db", "127.0.0.1")),
        (secret, "superexec.key", lambda: start.superexec(secret, "a:1", "b:2")),
        (device, "client-1-node.key", lambda: start.supernode(device, "client-1", "g:1", 0, 2, 9094)),
        (device, "superexec.key", lambda: start.supernode(device, "client-1", "g:1", 0, 2, 9094)),
    ):
        (folder / file).chmod(0o640)
        with pytest.raises(StorageError, match="chmod 600"):
            call()
        (folder / file).chmod(0o600)
    device.chmod(0o755)
    with pytest.raises(StorageError, match="chmod 700"):
        start.supernode(device, "client-1", "g:1", 0, 2, 9094)


@pytest.mark.slow
def test_a_process_with_a_limit_of_memory_gets_an_error_and_is_not_killed() -> None:
    code = (
        "from fedcross.deploy.start import limit_memory\n"
        "limit_memory('200m')\n"
        "try:\n"
        "    bytearray(300 * 2**20)\n"
        "except MemoryError:\n"
        "    print('MemoryError')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "MemoryError\n"
    for wrong in ("", "0", "3t", "-1g", "much"):
        with pytest.raises(ConfigError, match="with k, m or g"):
            start.limit_memory(wrong)


def test_the_superexec_limits_what_it_starts_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation.prepare(tmp_path, [])
    done: list[str] = []
    monkeypatch.setattr(start, "limit_memory", done.append)
    monkeypatch.setattr(start, "replace_process", lambda command, umask: done.append("started"))
    command = ["superexec", str(tmp_path / "superexec"), "--superlink", "superlink:8000", "--health", "127.0.0.1:0"]
    assert deploy([*command, "--memory", "3g"]) == deploy(command) == 0
    assert done == ["3g", "started", "started"]


def test_nothing_that_starts_calls_out() -> None:
    found = start.environment({"FLWR_TELEMETRY_ENABLED": "1", "PATH": "/bin"})
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["PATH"].endswith(":/bin")


def test_a_superlink_with_an_expired_or_foreign_certificate_does_not_start(tmp_path: Path) -> None:
    federation.prepare(tmp_path / "a", [])
    federation.prepare(tmp_path / "b", [])
    server = tmp_path / "a" / "server"
    (server / "ca.crt").write_bytes((tmp_path / "b" / "server" / "ca.crt").read_bytes())
    with pytest.raises(StorageError, match="not signed by"):
        start.superlink(server, tmp_path / "a" / "superexec", tmp_path / "s.db", "127.0.0.1")


def test_a_superexec_with_an_expired_ca_crt_does_not_start(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    folder = tmp_path / "superexec"
    (folder / "ca.crt").unlink()
    with days_ago(741):
        made = make_authority(tmp_path / "old")
    shutil.copy(made.public, folder / "ca.crt")
    with pytest.raises(StorageError, match=r"superexec/ca\.crt: expired on"):
        start.superexec(folder, "a:1", "b:2")


def test_a_variable_that_is_the_token_itself_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation.prepare(tmp_path, [])
    token = (tmp_path / "operator" / "token").read_text()
    monkeypatch.setenv(operators.VARIABLE, token)
    for begin in (
        lambda: start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / "s.db", "127.0.0.1"),
        lambda: start.superexec(tmp_path / "superexec", "a:1", "b:2"),
    ):
        with pytest.raises(StorageError, match=f"{operators.VARIABLE}=.*is it the token itself") as caught:
            begin()
        assert token not in str(caught.value)


def test_a_superexec_whose_runs_would_have_no_page_for_their_token_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.prepare(tmp_path, [])
    file = tmp_path / "page" / "token"
    monkeypatch.setenv(operators.PAGE, str(file))
    start.superexec(tmp_path / "superexec", "a:1", "b:2")
    token = file.read_text()
    monkeypatch.setenv(operators.PAGE, token)
    with pytest.raises(StorageError, match=f"{operators.PAGE}=.*is it the token itself") as caught:
        start.superexec(tmp_path / "superexec", "a:1", "b:2")
    assert token not in str(caught.value)


def test_programs_do_not_start_with_a_token_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation.prepare(tmp_path, [])
    token, operator = tmp_path / "server" / "gateway.token", tmp_path / "operator" / "token"
    for path in (token, operator):
        path.write_text("short")
    monkeypatch.setenv(operators.VARIABLE, str(operator))
    for begin in (
        lambda: start.gateway_of(tmp_path / "server"),
        lambda: start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / "s.db", "127.0.0.1"),
        lambda: gateway.prepare(tmp_path / "server", tmp_path / "work", "a:1", "b:2"),
    ):
        with pytest.raises(StorageError, match="token: no token, it is one line of 32 or more characters"):
            begin()


@pytest.mark.parametrize(
    ("name", "what"), [("server/server.key", "a private key"), ("page/token", "the live page's token")]
)
def test_no_program_says_to_remove_a_key_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    federation.prepare(tmp_path, [])
    monkeypatch.setenv(operators.VARIABLE, str(tmp_path / name))
    for begin in (
        lambda: start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / "s.db", "127.0.0.1"),
        lambda: start.superexec(tmp_path / "superexec", "a:1", "b:2"),
    ):
        with pytest.raises(
            StorageError, match=f"{operators.VARIABLE} names {what}. Name the operator's token"
        ) as error:
            begin()
        assert "emove" not in str(error.value).partition("names")[2]


@pytest.mark.parametrize(("content", "what"), [(b"my notes", "it is one line of 32"), (b"\xff" * 40, "it is no text")])
def test_a_file_elsewhere_that_a_variable_names_is_not_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, what: str
) -> None:
    federation.prepare(tmp_path, [])
    for name, cure in (
        ("notes", f"Name the operator's token in {operators.VARIABLE}"),
        ("operator/token", "Remove it"),
    ):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv(operators.VARIABLE, str(tmp_path / name))
        with pytest.raises(StorageError, match=rf"{name}: no token, {what}.*\. {cure}: fedcross deploy federation"):
            start.check_operator()


def test_a_folder_that_docker_has_made_for_a_token_is_to_be_removed(tmp_path: Path) -> None:
    """The advice, to call federation, led to the same error there."""
    federation.prepare(tmp_path, [])
    for name in ("server/gateway.token", "superexec/superexec.key"):
        path = tmp_path / name
        path.unlink()
        path.mkdir(mode=0o700)

        def begin() -> None:
            start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / "s.db", "127.0.0.1")
            start.gateway_of(tmp_path / "server")

        for call in (begin, lambda: federation.prepare(tmp_path, [])):
            with pytest.raises(StorageError, match=rf"{path}: is a folder, not a file .*: rmdir {path}\n"):
                call()
            (path / "file").touch()
            with pytest.raises(StorageError, match=rf"{path}: is a folder, not a file, and not empty\. Move") as told:
                call()
            assert "rmdir" not in str(told.value)
            (path / "file").unlink()
        path.rmdir()
        federation.prepare(tmp_path, [])
        begin()


def test_a_folder_that_a_variable_names_is_not_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setenv(operators.VARIABLE, str(tmp_path / "state"))
    with pytest.raises(StorageError, match=r"names a folder, not the file in it\. Name the operator's token") as told:
        start.check_operator()
    assert "rmdir" not in str(told.value)


def test_programs_do_not_start_with_a_key_that_is_none_or_another_pairs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        federation.prepare(tmp_path / name, ["porch"])
    server, secret, device = (tmp_path / "a" / name for name in ("server", "superexec", "porch"))

    def superlink() -> None:
        start.superlink(server, secret, tmp_path / "s.db", "127.0.0.1")

    superlink()
    before = (secret / "superexec.key").read_bytes()
    (secret / "superexec.key").write_bytes(b"")
    for begin in (superlink, lambda: start.superexec(secret, "a:1", "b:2")):
        with pytest.raises(StorageError, match="0 bytes, a secret has 16 or more"):
            begin()
    (secret / "superexec.key").write_bytes(before)
    (server / "server.key").write_bytes((tmp_path / "b" / "server" / "server.key").read_bytes())
    with pytest.raises(StorageError, match=r"server\.key: this is not the key of"):
        superlink()
    (device / "porch-node.key").write_bytes(b"junk")
    with pytest.raises(StorageError, match=r"porch-node\.key: this is no unencrypted OpenSSH private key"):
        start.supernode(device, "porch", "g:1", 0, 1, 9094)


def test_a_database_has_one_superlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is the process's, and of the program that it becomes; a link leads to the same database."""
    federation.prepare(tmp_path / "keys", [])
    monkeypatch.setattr(start.operators, "VARIABLE", "NOT_SET")
    database, link = tmp_path / "state.db", tmp_path / "link.db"
    link.symlink_to(database)
    database.touch()
    begun: list[list[str]] = []
    monkeypatch.setattr(start, "replace_process", begun.append)
    monkeypatch.setattr(programs.ports, "check", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(start, "ENDS_S", 0.0)
    keys = [str(tmp_path / "keys" / "server"), "--secret", str(tmp_path / "keys" / "superexec")]
    hold, held = start.hold, [start.hold(database)]
    monkeypatch.setattr(start, "hold", lambda asked: held.append(hold(asked)))
    assert os.get_inheritable(held[0])
    for name in (database, link):
        assert deploy(["superlink", *keys, "--database", str(name), "--host", "127.0.0.2"]) == 2
        assert f"--database {name}: a SuperLink runs with it (fuser {database} says" in capsys.readouterr().err
    assert not begun
    os.close(held.pop())
    assert deploy(["superlink", *keys, "--database", str(database), "--host", "127.0.0.2"]) == 0
    assert len(begun) == 1
    with pytest.raises(StorageError, match="a SuperLink runs with it"):  # this process is that one now
        hold(database)
    os.close(held.pop())


def test_a_superlink_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = start.hold(tmp_path / "state.db")
    monkeypatch.setattr(start.time, "sleep", lambda _: os.close(old))
    os.close(start.hold(tmp_path / "state.db"))
    assert "a SuperLink runs with it, or is ending. Waiting for 15 s." in capsys.readouterr().err


def test_a_database_with_two_names_is_refused(tmp_path: Path) -> None:
    """Each name has a lock and a log of its own."""
    database = tmp_path / "state.db"
    database.touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.db").hardlink_to(database)
    for name in (database, tmp_path / "other" / "state.db"):
        with pytest.raises(StorageError, match=r"2 names \(hard links\).*-samefile"):
            start.hold(name)
    database.unlink()
    os.close(start.hold(tmp_path / "other" / "state.db"))


def test_what_root_makes_beside_a_database_is_its_folders_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite gives its own files the owner of the database."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda _, *owner: given.append(owner))
    for _ in range(2):
        os.close(start.hold(tmp_path / "state.db"))
    folder = tmp_path.stat()
    assert given == [(folder.st_uid, folder.st_gid)] * 2  # once for the lock, once for the database
    assert (tmp_path / "state.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("end", ["", ".lock", "-wal", "-shm"])
def test_a_file_of_the_database_that_is_anothers_is_told_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    database, file = tmp_path / "state.db", tmp_path / f"state.db{end}"
    database.touch()
    file.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != file and access(path, how))
    assert re.search(
        rf"may not write {re.escape(str(file))} \(mode .*chmod u\+rw {re.escape(str(file))}$", start.closed(database)
    )


def test_a_damaged_database_is_an_error_in_words(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    database = tmp_path / "state.db"

    def begin() -> None:
        start.superlink(tmp_path / "server", tmp_path / "superexec", database, "127.0.0.1")

    database.touch()
    begin()
    database.write_bytes(b"garbage\n" * 100)
    told = r"--database .*state\.db: file is not a database\. Bring it back.* Leave revoked-keys\.json there as it is"
    with pytest.raises(StorageError, match=told):
        begin()
    (tmp_path / recorded.FILE).write_text("{")
    with pytest.raises(StorageError, match=r"revoked-keys\.json: no readable record of revoked keys"):
        begin()
    (tmp_path / recorded.FILE).unlink()
    database.unlink()
    database.mkdir()
    with pytest.raises(
        StorageError, match=r"state\.db: a folder\. Name the file, .*state\.db/superlink\.db perhaps"
    ) as error:
        begin()
    assert "copy" not in str(error.value)


def test_a_good_database_that_cannot_be_used_now_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older copy in its place would lose what was registered since."""
    monkeypatch.setattr(start, "LOCKED_S", 0)
    database = tmp_path / "state" / "superlink.db"
    database.parent.mkdir()
    start.check_database(database)  # a new one
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("CREATE TABLE node (public_key BLOB)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            StorageError, match=r"is locked\. Another program holds it .* Wait until .* leave it as it is"
        ):
            start.check_database(database)
    start.check_database(database)
    allowed = os.access
    for shut, mode in ((database.parent, "rwx"), (database, "rw")):
        shut.chmod(0o500)
        monkeypatch.setattr(start.os, "access", lambda path, needed, shut=shut: path != shut and allowed(path, needed))
        with pytest.raises(StorageError, match=rf"may not write {shut} \(mode 500, .*: chmod u\+{mode} {shut}$"):
            start.check_database(database)
        monkeypatch.setattr(start.os, "geteuid", lambda: 7)
        with pytest.raises(StorageError, match=rf"\. Run as that user\. If it is to be this one's: chown 7 {shut}$"):
            start.check_database(database)
        monkeypatch.undo()


def test_another_error_of_the_database_does_not_ask_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "superlink.db"
    database.touch()
    for name in ("SQLITE_READONLY_DIRECTORY", "SQLITE_CANTOPEN", "SQLITE_IOERR_READ"):
        error = sqlite3.OperationalError("no")
        error.sqlite_errorname = name

        def fails(*_: object, error: sqlite3.Error = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(start.sqlite3, "connect", fails)
        with pytest.raises(StorageError, match=r"superlink\.db: no\. Look at its disk, .* leave it as it is until"):
            start.check_database(database)


@pytest.mark.parametrize("name", [":memory:", ":flwr-in-memory:", "sqlite:///state.db", "SQLite+x://s.db"])
def test_a_database_that_keeps_no_revoked_key_out_is_refused(tmp_path: Path, name: str) -> None:
    federation.prepare(tmp_path, [])
    with pytest.raises(StorageError, match=r"name a file\. A database in memory"):
        start.superlink(tmp_path / "server", tmp_path / "superexec", Path(name), "127.0.0.1")
    start.superlink(tmp_path / "server", tmp_path / "superexec", tmp_path / ":memory:", "127.0.0.1")  # a file to Flower


def test_a_new_database_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another working directory everybody who was revoked may be registered again."""
    federation.prepare(tmp_path, [])
    monkeypatch.chdir(tmp_path)

    def told() -> list[str]:
        start.superlink(tmp_path / "server", tmp_path / "superexec", Path("s.db"), "127.0.0.1")
        return [line for line in capsys.readouterr().err.splitlines() if "s.db" in line]

    new = f"--database {tmp_path / 's.db'}: new: no device is registered here, "
    assert told() == [f"{new}none is revoked"]
    (tmp_path / "s.db").touch()
    assert told() == [f"{new}none is revoked"]
    recorded.Record(tmp_path / recorded.FILE).add([b"key"])
    assert told() == [f"{new}keys revoked: 1 ({recorded.FILE})"]
    with contextlib.closing(sqlite3.connect("s.db")) as database:
        database.execute("CREATE TABLE node (public_key BLOB)")
    assert told() == []


def test_a_folder_that_all_can_write_is_told_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation.prepare(tmp_path, [])
    state = tmp_path / "state"
    state.mkdir()
    for mode, told in ((0o700, False), (0o1777, False), (0o777, True)):
        state.chmod(mode)
        start.superlink(tmp_path / "server", tmp_path / "superexec", state / "superlink.db", "127.0.0.1")
        assert (f"{state}: mode 777, so others on this machine can replace" in capsys.readouterr().err) == told


def test_a_database_on_a_disk_that_is_away_is_not_made_anew(tmp_path: Path) -> None:
    """In the mount point no record of revoked keys would lie beside it."""
    federation.prepare(tmp_path, [])
    database, disk = tmp_path / "superlink.db", tmp_path / "disk"
    disk.mkdir()
    database.symlink_to(disk / "superlink.db")
    called = (tmp_path / "server", tmp_path / "superexec", database, "127.0.0.1")
    with pytest.raises(StorageError, match=r"superlink\.db: a link to .* not there\. Is its disk mounted\?") as error:
        start.superlink(*called)
    assert str(error.value).endswith(f"touch {disk}/superlink.db")
    (disk / "superlink.db").touch()
    start.superlink(*called)
