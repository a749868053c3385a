"""What ``fedcross doctor`` says at the server of what its programs serve, and of a database beside its record."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import socket
import sqlite3
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState

from fedcross.core.trust import signing
from fedcross.core.trust.admission import fingerprint
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy import federation, start
from fedcross.engines.executor import barred, entry, operators, recorded
from fedcross.server import page_variables as page
from fedcross.server.commands import doctor, server_checks
from fedcross.server.commands.findings import Finding
from tests.engines.executor.test_barred import REPLACED, copied, register, revoke
from tests.server.commands.test_device_checks import Gateway
from tests.support.link_state import opened

Serve = Callable[..., str]


class Answers(Gateway):
    """A gateway or SuperLink that answers as the class says, and keeps the gateway's tokens that it was called with.

    `operator`, `gateway`: what a SuperLink asks for, "" if for nothing; None: this is a gateway.
    """

    status, tokens = 412, [""]
    operator: str | None = None
    gateway: str | None = None

    def do_POST(self) -> None:
        if self.path.startswith(operators.CONTROL):
            brought = self.headers.get(operators.HEADER, "")
            if self.operator is None:
                self.refuse(403, "")
            elif self.operator and brought != self.operator:
                self.refuse(401, operators.ANOTHER if brought else operators.WHY)
            else:
                self.refuse(200, "")
            return
        Answers.tokens.append(self.headers.get(entry.GATEWAY, ""))
        if self.gateway and Answers.tokens[-1] != self.gateway:
            self.refuse(401, entry.NOT_THE_GATEWAY)
            return
        super().do_POST()

    def refuse(self, status: int, body: str) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    federation.prepare(tmp_path / "keys", [])
    return tmp_path / "keys"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    started = []

    def begun(pair: KeyPair, asks: ssl.VerifyMode = ssl.CERT_NONE) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.public, pair.private)
        context.verify_mode = asks
        if asks:  # in TLS 1.3 a client learns of it after the handshake
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return f"127.0.0.1:{server.server_port}"

    yield begun
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def own(keys: Path) -> KeyPair:
    return KeyPair(keys / "server" / "server.crt", keys / "server" / "server.key")


def findings(arguments: list[str], tmp_path: Path) -> list[Finding]:
    asked = doctor._parser().parse_args([*arguments, "--output", str(tmp_path)])
    checks = list(doctor._checks(asked))[-len(asked.connect) - bool(asked.database) :]
    return [finding for check in checks for finding in check]


def test_a_certificate_that_was_renewed_and_is_not_served_yet_is_a_fault(
    keys: Path, serve: Serve, tmp_path: Path
) -> None:
    address = serve(own(keys))
    asked = ["--keys", str(keys / "authority"), str(keys / "server"), "--connect", address]
    answers, served, token = findings(asked, tmp_path)
    assert [one.kind for one in (answers, served, token)] == ["ok", "ok", "ok"]
    assert served.text == f"{address} serves {keys / 'server' / 'server.crt'}"
    assert Answers.tokens[-1] == (keys / "server" / "gateway.token").read_text()
    root = KeyPair(keys / "authority" / "ca.crt", keys / "authority" / "ca.key")
    signing.make_server(root, keys / "server", ["gateway"])
    Answers.tokens = []
    _, stale = findings(asked, tmp_path)
    assert stale.kind == "FAULT"
    assert f"{address}: serves another certificate (until " in stale.text
    assert stale.text.endswith("read that file at their start only. Restart the SuperLink and the gateway.")
    assert Answers.tokens == []  # it goes to nobody else
    federation.prepare(tmp_path / "other", [])
    other = serve(own(tmp_path / "other"))
    _, foreign = findings(["--keys", str(keys / "server"), "--connect", other], tmp_path)
    assert (foreign.kind, "ca.crt did not sign it. Is this the address of the" in foreign.text) == ("FAULT", True)
    folder = f"and {keys / 'server'} this federation's? Compare its ca.crt with keys/public/ca.crt"
    assert foreign.text.index(folder) < foreign.text.index("Restart nothing before") < foreign.text.index("restart the")


def test_a_gateway_that_asks_for_a_clients_certificate_speaks_tls(keys: Path, serve: Serve, tmp_path: Path) -> None:
    address = serve(own(keys), asks=ssl.CERT_REQUIRED)
    *_, found = findings(["--keys", str(keys / "server"), "--connect", address], tmp_path)
    assert (found.kind, "refuses TLS, as a gateway does that asks for" in found.text) == ("note", True)


def test_two_tokens_of_the_gateway_are_a_fault(
    keys: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--keys", str(keys / "server"), "--connect", serve(own(keys))]
    monkeypatch.setattr(Answers, "status", 401)
    monkeypatch.setattr(Answers, "body", entry.NOT_THE_GATEWAY)
    *_, found = findings(asked, tmp_path)
    assert found.kind == "FAULT"
    assert "the SuperLink does not take the gateway's calls, so no device gets in: two different" in found.text
    monkeypatch.setattr(Answers, "status", 503)
    *_, found = findings(asked, tmp_path)
    assert (found.kind, "its SuperLink does not answer it" in found.text) == ("note", True)
    monkeypatch.setattr(Answers, "status", 404)  # the page
    assert [one.kind for one in findings(asked, tmp_path)] == ["ok", "ok"]


def test_a_token_that_only_the_superlink_has_not_read_keeps_no_device_out(
    superlink: list[str], keys: Path, tmp_path: Path
) -> None:
    """Gateway and SuperLink have the old one, and all works."""
    file = keys / "server" / "gateway.token"
    file.unlink()
    federation.prepare(keys, [])
    (found,) = [one for one in findings(superlink, tmp_path) if one.kind == "FAULT"]
    assert f"the SuperLink does not take the token in {file}: it read another one at its start. If" in found.text
    assert found.text.endswith("devices get in still. Restart both together, so that they read the file.")
    assert "no device gets in" not in found.text


@pytest.fixture
def superlink(keys: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how to ask a SuperLink that asks for the tokens in `keys`."""
    monkeypatch.delenv(operators.VARIABLE, raising=False)
    monkeypatch.setattr(Answers, "operator", (keys / "operator" / "token").read_text())
    monkeypatch.setattr(Answers, "gateway", (keys / "server" / "gateway.token").read_text())
    return ["--keys", str(keys / "server"), str(keys / "operator"), "--connect", serve(own(keys))]


def test_a_superlink_that_asks_for_both_tokens_is_in_order(superlink: list[str], keys: Path, tmp_path: Path) -> None:
    found = findings(superlink, tmp_path)
    assert [one.kind for one in found] == ["ok"] * 5
    assert found[-2].text.endswith("no run is started or stopped without the operator's token")
    assert found[-1].text.endswith(f"the SuperLink takes the operator's token in {keys / 'operator' / 'token'}")


def test_a_superlink_without_the_operators_token_is_a_fault(
    superlink: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "operator", "")
    *good, found = findings(superlink, tmp_path)
    assert ([one.kind for one in good], found.kind) == (["ok"] * 3, "FAULT")
    assert "who reaches it can start and stop runs and register devices: the SuperLink was started" in found.text
    assert f"without {operators.VARIABLE}. Set it, and restart the SuperLink" in found.text


def test_an_operators_token_that_the_superlink_has_not_read_is_a_fault(
    superlink: list[str], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made anew because the old one has leaked, which counts until the SuperLink is restarted."""
    old, file = tmp_path / "old", keys / "operator" / "token"
    shutil.copy(file, old)
    file.unlink()
    federation.prepare(keys, [])
    *good, found = findings(superlink, tmp_path)
    assert ([one.kind for one in good], found.kind) == (["ok"] * 4, "FAULT")
    assert f"does not take the operator's token in {file}. It has read another one at its start" in found.text
    assert "If this one was made anew since, restart the SuperLink" in found.text
    assert found.text.endswith(f"Else name the right file in {operators.VARIABLE}.")  # "deploy nodes" says so too
    monkeypatch.setenv(operators.VARIABLE, str(old))
    *good, found = findings(superlink, tmp_path)
    assert ([one.kind for one in good], found.kind) == (["ok"] * 5, "FAULT")
    assert good[-1].text.endswith(f"takes the operator's token in {old}")


def test_a_variable_that_names_a_copy_of_another_token_is_not_cured_by_a_restart(
    superlink: list[str], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, file = tmp_path / "copy", keys / "operator" / "token"
    shutil.copy(keys / "page" / "token", copy)
    monkeypatch.setenv(operators.VARIABLE, str(copy))
    (found,) = (one.text for one in findings(superlink, tmp_path) if one.kind == "FAULT")
    assert found.endswith(f"It takes that in {file}, so {operators.VARIABLE} names the wrong file: name that one.")
    file.unlink()
    (found,) = (one.text for one in findings(superlink, tmp_path) if one.kind == "FAULT")
    assert found.endswith(f"Else name the right file in {operators.VARIABLE}.")


@pytest.mark.parametrize("variable", [operators.VARIABLE, page.TOKEN_FILE])
def test_a_variable_that_names_a_key_or_anothers_token_is_told_to_name_its_own(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The advice was to remove the file, and for one that all may read to make a token anew."""
    monkeypatch.delenv(operators.VARIABLE, raising=False)
    database = tmp_path / "superlink.db"
    with contextlib.closing(sqlite3.connect(database)) as made:
        made.execute("CREATE TABLE node (public_key)")
    owner = operators.FOLDERS[variable]
    for file, what in {
        keys / "authority" / "ca.key": "a private key",
        keys / "server" / "server.key": "a private key",
        keys / "superexec" / "superexec.key": "the SuperExec's secret",
        keys / "server" / "server.crt": "a certificate",
        database: "a database",
        keys / "server" / "gateway.token": "the gateway's token",
        keys / ("page" if owner == "operator" else "operator") / "token": "'s token",
    }.items():
        monkeypatch.setenv(variable, str(file))
        (found,) = server_checks.check_tokens()
        assert (found.kind, str(file) in found.text, what in found.text) == ("FAULT", True, True)
        assert found.text.endswith(
            f"Name {operators.OWNERS[owner]} in {variable}: fedcross deploy federation keeps it in keys/{owner}/token."
        )
        assert not re.search("[Rr]emove|chmod", found.text)


def test_two_tokens_that_are_one_text_are_a_fault(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (operators.VARIABLE, page.TOKEN, page.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    folders = [keys / name for name in ("server", "page", "operator")]
    gateway, ours, token = (folder / name for folder, name in zip(folders, ("gateway.token", "token", "token")))
    monkeypatch.setenv(operators.VARIABLE, str(token))
    monkeypatch.setenv(page.TOKEN_FILE, str(ours))
    assert list(server_checks.check_different(folders)) == []
    kept = ours.read_bytes()
    ours.write_bytes(token.read_bytes())
    arguments = ["--output", str(tmp_path), "--keys", *map(str, folders)]
    (found,) = (one for one in doctor.examine(doctor._parser().parse_args(arguments)) if "one text" in one.text)
    assert found.kind == "FAULT"
    assert found.text.startswith(f"{ours} and {token}: one text is the live page's token and the operator's token")
    assert found.text.endswith(
        f"Remove {ours} and {token}: fedcross deploy federation makes a new one, and says what to restart."
    )
    assert token.read_text() not in found.text
    ours.write_bytes(kept)
    copy = tmp_path / "copy"
    shutil.copy(gateway, copy)
    monkeypatch.setenv(page.TOKEN_FILE, str(copy))
    (found,) = server_checks.check_different(folders)
    assert found.text.endswith(
        f"Give {page.TOKEN_FILE} another token. Remove {gateway}: fedcross deploy federation "
        "makes a new one, and says what to restart."
    )
    monkeypatch.delenv(page.TOKEN_FILE)
    monkeypatch.setenv(page.TOKEN, token.read_text())
    (found,) = server_checks.check_different([])
    assert f"Give {operators.VARIABLE} and {page.TOKEN} another token." in found.text


def test_a_superlink_that_takes_devices_past_its_gateway_is_a_fault(
    superlink: list[str], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "gateway", None)
    *good, found = findings(superlink, tmp_path)
    assert ([one.kind for one in good], found.kind) == (["ok"] * 5, "FAULT")
    file = keys / "server" / "gateway.token"
    assert f"can call as a device, past the gateway: the SuperLink has read no {file} at its start" in found.text
    monkeypatch.setattr(Answers, "operator", None)  # a gateway, which brings the token itself
    assert [one.kind for one in findings(superlink, tmp_path)] == ["ok"] * 3


def test_no_token_goes_to_a_program_that_takes_the_superlinks_place(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, superlink: list[str]
) -> None:
    """Another user's, that gets the port while the SuperLink restarts."""
    federation.prepare(tmp_path / "other", [])
    connected, asked = server_checks._connected, list[str]()

    @contextlib.contextmanager
    def replaced(address: str) -> Iterator[Any]:
        with connected(address) as connection:
            if asked:
                other = (tmp_path / "other" / "server" / "server.crt").read_text()
                monkeypatch.setattr(connection.sock, "getpeercert", lambda **_: ssl.PEM_cert_to_DER_cert(other))
            asked.append(address)
            yield connection

    Answers.tokens = []
    monkeypatch.setattr(server_checks, "_connected", replaced)
    assert [one.kind for one in findings(superlink, tmp_path)] == ["ok", "ok"]
    assert (len(asked), Answers.tokens) == (2, [])


def test_variables_that_are_tokens_themselves_are_faults_and_not_printed(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {operators.VARIABLE: keys / "operator" / "token", page.TOKEN_FILE: keys / "page" / "token"}
    for name in (
        operators.VARIABLE,
        page.TOKEN,
        page.TOKEN_FILE,
        page.PLACE,
        page.URL,
    ):
        monkeypatch.delenv(name, raising=False)
    assert list(server_checks.check_tokens()) == []
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    assert [one.kind for one in server_checks.check_tokens()] == ["ok", "ok"]
    monkeypatch.delenv(page.TOKEN_FILE)
    monkeypatch.setenv(page.TOKEN, str(files[page.TOKEN_FILE]))
    assert [one.kind for one in server_checks.check_tokens()] == ["ok", "FAULT"]
    monkeypatch.delenv(page.TOKEN)
    monkeypatch.delenv(operators.VARIABLE)
    for name in (*files, page.PLACE, page.URL):
        token = files[operators.VARIABLE].read_text()
        monkeypatch.setenv(name, token)
        [found] = server_checks.check_tokens()
        assert (found.kind, name in found.text, token in found.text) == ("FAULT", True, False)
        monkeypatch.delenv(name)


def test_an_address_without_tls_or_keys_without_a_certificate_compare_nothing(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"127.0.0.1:{plain.getsockname()[1]}"
        answers, nothing = findings(["--keys", str(keys / "server"), "--connect", address], tmp_path)
        assert (answers.kind, nothing.kind, "speaks no TLS" in nothing.text) == ("ok", "note", True)
        for without in ([], ["--keys", str(keys / "superexec"), str(tmp_path / "none")]):
            assert [one.kind for one in findings([*without, "--connect", address], tmp_path)] == ["ok"]


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACED:
        monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))
    barred.attach()


def key_of(number: int) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return bytes(public_key_to_bytes(ec.derive_private_key(number, ec.SECP384R1()).public_key()))


def test_a_database_that_lets_revoked_keys_in_is_a_fault(tmp_path: Path, attached: None) -> None:
    file, copy, thief = tmp_path / "state #1%" / "link.db", tmp_path / "copy", key_of(7)
    file.parent.mkdir()

    def told() -> list[Finding]:
        return findings(["--database", str(file)], tmp_path)

    [none] = told()
    assert (none.kind, "no such database" in none.text) == ("FAULT", True)
    state: Any = opened(file)
    number = register(state, thief)
    register(state, key_of(8))
    copied(file, copy)
    [good] = told()
    assert (good.kind, good.text) == ("ok", f"{file}: registered keys 2; revoked 0")
    revoke(state, number)
    [good] = told()
    assert (good.kind, good.text) == ("ok", f"{file}: registered keys 1; revoked 1, all in {recorded.FILE}")
    record = recorded.beside(file)
    kept = record.read_bytes()
    record.unlink()
    [lost] = told()
    assert lost.kind == "FAULT"
    assert f"{record}: missing, or lacks 1 of the 1 keys that {file} has as revoked ({fingerprint(thief)})" in lost.text
    record.write_bytes(kept)
    copied(copy, file)
    [old] = told()
    assert old.kind == "FAULT"
    assert f"{file}: does not have 1 of the 1 keys as revoked that {record} records" in old.text
    for path in file.parent.glob("link.db*"):
        path.write_bytes(b"")
    assert "an older copy or a new file does" in told()[0].text
    file.write_bytes(b"garbage\n" * 100)
    assert "file is not a database" in told()[0].text
    record.write_text("{")
    assert "no readable record of revoked keys" in told()[0].text


def test_a_database_that_cannot_be_written_now_is_a_fault_and_left_as_it_is(
    tmp_path: Path, attached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOCKED_S", 0)
    file = tmp_path / "superlink.db"
    register(opened(file), key_of(7))
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        before = file.read_bytes()
        for lock in ("IMMEDIATE", "EXCLUSIVE"):
            other.execute(f"BEGIN {lock}")
            (found,) = findings(["--database", str(file)], tmp_path)
            assert (found.kind, f"{file}: database is locked. Another program holds it" in found.text) == (
                "FAULT",
                True,
            )
            assert found.text.endswith("The database is good: leave it as it is.")
            other.execute("ROLLBACK")
    assert [one.kind for one in findings(["--database", str(file)], tmp_path)] == ["ok"]
    assert file.read_bytes() == before


def test_a_file_that_is_no_superlinks_database_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    file.touch()
    [empty] = server_checks.check_database(file)
    assert (empty.kind, "no database of a SuperLink, it has no table of devices" in empty.text) == ("FAULT", True)
    for made in ("CREATE TABLE other (x)", "CREATE TABLE node (public_key, status)"):
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute(made)
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("INSERT INTO node VALUES ('text', 'registered'), (7, 'registered')")
    [made_up] = server_checks.check_database(file)
    assert made_up.kind == "FAULT"
    assert "cannot be read as a SuperLink's database (keys in its table node are none)" in made_up.text


def test_a_state_that_others_can_change_is_a_fault(
    tmp_path: Path, attached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state" / "superlink.db"
    file.parent.mkdir()
    state: Any = opened(file)
    revoke(state, register(state, key_of(7)))
    record, found = recorded.beside(file), Path.stat
    file.parent.chmod(0o777)
    faults = [one.text for one in server_checks.check_database(file) if one.kind == "FAULT"]
    assert faults == [recorded.open_folder(file)]
    assert faults[0].endswith(f"let revoked keys in: chmod o-w {file.parent}")
    file.parent.chmod(0o1777)
    assert recorded.open_folder(file) == ""
    file.parent.chmod(0o700)
    record.chmod(0o666)
    assert "Close it: chmod 600" in next(iter(server_checks.check_database(file))).text
    record.chmod(0o600)

    def owned(path: Path, **options: bool) -> os.stat_result:
        fields = list(found(path, **options))
        fields[4:6] = [0 if path == record else 10001] * 2
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    faults = [one.text for one in server_checks.check_database(file) if one.kind == "FAULT"]
    assert len(faults) == 1
    assert f"{record}: User 0 owns it, and user 10001 its folder: chown 10001:10001 {record}" in faults[0]


def test_the_commands_that_the_docs_name_ask_gateway_and_superlink() -> None:
    """A new token that neither has read: the gateway alone, with the old one, gets an answer of a SuperLink with it."""
    root = Path(__file__).parents[3]
    pages = [root / "docs" / name for name in ("deploy.md", "deploy-without-containers.md", "reliability.md")]
    texts = [page.read_text() for page in (*pages, root / "server" / "commands" / "doctor.py")]
    commands = [
        line.split("--connect ")[1]
        for text in texts
        for line in text.splitlines()
        if "--keys" in line and "--connect " in line
    ]
    asked = [re.match(r"(\S+:8443) (\S+:8000)", one) for one in commands]
    assert len(asked) == 4
    assert all(asked)
