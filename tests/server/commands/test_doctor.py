import argparse
import sqlite3
from email.utils import formatdate
from pathlib import Path

import pytest

from fedcross.deploy import keys
from fedcross.engines.certificates import KeyPair, make_authority, make_server
from fedcross.server.commands import doctor
from tests.deploy.test_gateway import Gate, gate, needs_haproxy  # noqa: F401 - a fixture


def kinds(findings):
    return [finding.kind for finding in findings]


@pytest.fixture
def folder(tmp_path):
    keys.init(tmp_path / "keys", ["client-1"])
    return tmp_path / "keys"


def test_this_machine_is_well_and_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCROSS_DATA", raising=False)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.endswith("0 faults\n")


def test_a_package_that_is_missing_or_too_old_is_named_with_its_cure(monkeypatch):
    wanted = ["numpy>=999", "no-such-package", "ray-missing; extra == 'x'", "ray>=0"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    found = [finding for finding in doctor.check_versions() if finding.kind == "FAULT"]
    assert len(found) == 2
    assert all("pip install" in finding.text for finding in found)


@pytest.mark.parametrize(("make", "kind"), [(None, "FAULT"), ("empty", "FAULT"), ("full", "ok")])
def test_a_data_folder_that_is_named_must_be_there(tmp_path, make, kind):
    if make:
        (tmp_path / "data").mkdir()
    if make == "full":
        (tmp_path / "data" / "x.npz").touch()
    assert kinds(doctor.check_data(tmp_path / "data", True)) == [kind]
    assert kinds(doctor.check_data(tmp_path / "data", False)) == [kind.replace("FAULT", "note")]


def test_a_disk_that_is_too_full_or_closed_is_a_fault(tmp_path):
    assert kinds(doctor.check_disk(tmp_path / "new" / "folder")) == ["ok"]
    assert kinds(doctor.check_disk(tmp_path, least=2**70)) == ["FAULT"]
    assert kinds(doctor.check_disk(Path("/proc/1"))) == ["FAULT"]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda server: (server / "server.key").chmod(0o644), "chmod 600"),
        (
            lambda server: (server / "server.key").write_bytes((server.parent / "authority/ca.key").read_bytes()),
            "renew",
        ),
        (lambda server: (server / "server.key").write_text("x"), "no readable private key"),
        (lambda server: (server / "ca.crt").unlink(), "init"),
        (lambda server: make_server(pair(server), server, ["localhost"], 13), "expires in 1"),
        (lambda server: make_server(pair(server), server, ["localhost"], 0), "expired"),
    ],
    ids=["open", "other", "damaged", "missing", "soon", "over"],
)
def test_what_is_wrong_with_keys_is_a_fault_with_its_cure(folder, harm, told):
    harm(folder / "server")
    found = list(doctor.examine(_asked(keys=[folder / "server"])))
    faults = [finding.text for finding in found if finding.kind == "FAULT"]
    assert len(faults) == 1
    assert told in faults[0]


def pair(server):
    return KeyPair(server.parent / "authority" / "ca.crt", server.parent / "authority" / "ca.key")


def _asked(**more):
    asked = {
        "data": None,
        "output": Path(),
        "gpu": False,
        "keys": [],
        "superlink": None,
        "listen": [],
        "database": None,
    }
    return argparse.Namespace(**{**asked, **more})


def test_a_database_that_is_locked_or_none_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CONNECT_S", 0.1)
    path = tmp_path / "superlink.db"
    assert kinds(doctor.check_database(path)) == ["ok"]
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert kinds(doctor.check_database(path)) == ["FAULT"]
    other.close()
    path.write_text("no database" * 100)
    assert kinds(doctor.check_database(path)) == ["FAULT"]


@needs_haproxy
def test_a_device_asks_its_gateway(gate: Gate, tmp_path, monkeypatch):  # noqa: F811
    address = f"localhost:{gate.port}"
    authority = Path(gate.authority)
    assert kinds(doctor.check_server(address, authority)) == ["ok", "ok"]
    monkeypatch.setattr(doctor, "parsedate_to_datetime", lambda _: _later(600))
    assert kinds(doctor.check_server(address, authority)) == ["ok", "FAULT"]
    other = make_authority(tmp_path / "other").public
    (found,) = doctor.check_server(address, other)
    assert (found.kind, "refused" in found.text) == ("FAULT", True)
    (found,) = doctor.check_server("localhost:1", authority)
    assert (found.kind, "no answer" in found.text) == ("FAULT", True)


def _later(seconds):
    import time
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(formatdate(time.time() + seconds))
