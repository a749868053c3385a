"""Whether ``fedcross deploy federation`` notices another authority, one that is lost, and one at its end."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from unittest.mock import patch

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.trust import certificates, fields, signing
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy import authorities, federation
from fedcross.deploy.device import Device, new_client
from fedcross.server.commands import key_checks
from tests.support.command import subcommand

deploy = subcommand("deploy")
PARTS = federation.OWN[1:]


@contextmanager
def days_ago(days: int) -> Iterator[None]:
    """Let what makes and checks certificates take this day for an earlier one."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Then:
            return cls.fromtimestamp((datetime.now(tz) - timedelta(days=days)).timestamp(), tz)

    with ExitStack() as stack:
        for module in (fields, certificates, signing, authorities):
            stack.enter_context(patch.object(module, "datetime", Then))
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    federation.prepare(tmp_path / "keys", ["porch"], ["fl.example.org"])
    return tmp_path / "keys"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    federation.prepare(tmp_path / "other", [])
    return tmp_path / "other"


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """A federation whose authority ended eleven days ago."""
    with days_ago(741):
        signing.make_authority(tmp_path / "keys" / "authority")
    with days_ago(30):
        federation.prepare(tmp_path / "keys", ["porch"], ["fl.example.org"])
    return tmp_path / "keys"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def asked_for(error: BaseException, command: str) -> list[str]:
    """Return the command that a message ends a line with, in words."""
    [line] = [line for line in str(error).splitlines() if f": {command} " in line]
    return shlex.split(line[line.index(f": {command} ") + 2 :])


def doctor(*folders: Path) -> list[str]:
    found = [one for folder in folders for one in key_checks.check_keys(folder, None)]
    return [one.text for one in (*found, *key_checks.check_one_authority(folders)) if one.kind == "FAULT"]


def test_another_federations_authority_is_refused_and_taken_on_purpose(
    root: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every device would be locked out."""
    shutil.rmtree(root / "authority")
    shutil.copytree(other / "authority", root / "authority")
    before = contents(root)
    with pytest.raises(StorageError, match=r"of another authority than its copy .*Bring the federation's own") as error:
        federation.prepare(root, [])
    assert contents(root) == before
    remove = asked_for(error.value, "rm")
    assert remove[1:] == [str(root / name / "ca.crt") for name in PARTS]
    subprocess.run(remove, check=True)
    assert deploy(["federation", str(root)]) == 0
    assert "Restart the SuperLink, the gateway and the SuperExec: server/server.key is new" in capsys.readouterr().err
    names = certificates.server_names(root / "server" / "server.crt")
    assert "fl.example.org" in names
    for name in PARTS:
        (root / name / "ca.crt").unlink()
    with pytest.raises(StorageError, match=r"than its copy .*porch/ca\.crt"):
        federation.prepare(root, ["porch"])


@pytest.mark.parametrize("key", [True, False])
def test_a_foreign_ca_crt_in_the_authoritys_folder_is_named_with_the_good_copy(
    root: Path, other: Path, key: bool
) -> None:
    path = root / "authority" / "ca.crt"
    good = path.read_bytes()
    shutil.copy(other / "authority" / "ca.crt", path)
    if not key:
        (root / "authority" / "ca.key").unlink()
    before = contents(root)
    faults = doctor(*(root / name for name in federation.OWN))
    assert faults[-1].startswith(f"{path}: of another authority than {root / 'server' / 'ca.crt'}. fedcross deploy fed")
    assert len(faults) == 1 + key
    assert not key or faults[0].endswith(
        "One of the two is another authority's: fedcross deploy federation says which."
    )
    with pytest.raises(StorageError, match=r"authority/ca\.crt: of another authority than its copy") as error:
        federation.prepare(root, [])
    assert "not good any more" not in str(error.value)
    assert ("on purpose" in str(error.value)) != key  # the key shows which is right
    assert contents(root) == before
    subprocess.run(asked_for(error.value, "cp"), check=True)
    assert path.read_bytes() == good
    assert federation.prepare(root, []) == []
    assert doctor(*(root / name for name in federation.OWN)) == []


@pytest.mark.parametrize("name", ["server", "public"])
def test_a_foreign_copy_is_made_again(root: Path, other: Path, name: str) -> None:
    path = root / name / "ca.crt"
    shutil.copy(other / "authority" / "ca.crt", path)
    faults = doctor(root / "authority", root / "operator", root / name)
    assert faults[-1].startswith(f"{path}: of another authority than {root / 'authority' / 'ca.crt'}.")
    if name == "server":
        assert "server.crt: not signed by" in faults[0]
        assert faults[0].endswith("is another authority's: fedcross deploy federation puts both right, or says how.")
    with pytest.raises(StorageError, match=r"another authority's\. Put the federation's ca\.crt there"):
        certificates.check_certificate(path, root / "authority" / "ca.crt")
    assert federation.prepare(root, []) == [str(path)]
    assert doctor(root / "authority", root / name) == []


@pytest.mark.parametrize("lost", ["ca.crt", "folder"])
def test_a_lost_ca_crt_is_brought_back_with_the_command_that_is_named(root: Path, other: Path, lost: str) -> None:
    folder = root / "authority"
    key = (folder / "ca.key").read_bytes()
    shutil.copy(other / "authority" / "ca.crt", root / "operator" / "ca.crt")  # the first copy is a bad one
    if lost == "folder":
        shutil.rmtree(folder)
        (root / "operator" / "ca.crt").unlink()
    else:
        (folder / "ca.crt").unlink()
    with pytest.raises(StorageError, match=r"ca\.crt: missing, though .*ca\.crt is a copy of it\. Bring it") as error:
        federation.prepare(root, [])
    assert ("nothing can be signed" in str(error.value)) == (lost == "folder")
    command = asked_for(error.value, "cp" if lost == "ca.crt" else "mkdir")
    subprocess.run(shlex.join(command).replace("'&&'", "&&"), shell=True, check=True)
    assert oct(folder.stat().st_mode)[-3:] == "700"
    assert (folder / "ca.crt").read_bytes() == (root / "public" / "ca.crt").read_bytes()
    assert lost == "folder" or (folder / "ca.key").read_bytes() == key
    assert federation.prepare(root, []) == [str(root / "operator" / "ca.crt")]


def test_an_expired_authority_is_told_and_gets_a_successor_once_it_is_moved_away(
    expired: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = expired / "authority"
    cure = f"Move the files in {folder} away, make a new authority (fedcross deploy federation {expired})"
    asked = f"(11 days ago by this clock). Is this clock right? If it is: {cure}"
    for command in (
        ["federation", str(expired)],
        ["authority", str(folder)],
        ["server", str(folder), str(expired / "server"), "a.org"],
        ["check", str(folder / "ca.crt"), str(expired / "server" / "server.crt")],
    ):
        assert deploy(command) == 2
        said = capsys.readouterr().err
        assert "ca.crt: expired on " in said
        assert asked in said
    faults = doctor(folder, expired / "server")
    assert len(faults) == 2
    assert cure in faults[0]
    assert faults[1].endswith(f"See what fedcross deploy federation {expired} says.")
    (folder / "ca.crt").unlink()
    assert deploy(["federation", str(expired)]) == 2
    assert "or remove the key if no device has the certificate, or it has expired" in capsys.readouterr().err
    (folder / "ca.key").unlink()
    assert "A new authority locks out all devices" not in doctor(folder)[0]
    made = federation.prepare(expired, ["porch"])
    assert {str(folder / "ca.crt"), str(expired / "server" / "server.crt"), str(expired / "porch" / "ca.crt")} <= {
        *made
    }
    assert "expired, so nothing trusts it any more. Hand the new ca.crt to all devices" in capsys.readouterr().err
    assert "fl.example.org" in certificates.server_names(expired / "server" / "server.crt")
    assert doctor(*(expired / name for name in federation.OWN)) == []


def test_a_certificate_that_ends_with_its_authority_is_not_to_be_rotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signing.make_authority(tmp_path / "authority", 1)
    federation.prepare(tmp_path, [])
    assert f"fedcross deploy authority {tmp_path / 'authority'}" in capsys.readouterr().err
    faults = doctor(tmp_path / "server")
    assert len(faults) == 2
    assert "0 days left. It ends with its authority: make a new authority and hand its ca.crt to" in faults[1]
    assert deploy(["check", str(tmp_path / "authority" / "ca.crt"), str(tmp_path / "server" / "server.crt")]) == 0
    assert "rotate" not in capsys.readouterr().out


@pytest.mark.parametrize("key", [True, False])
def test_doctor_says_that_a_certificate_is_to_be_renewed_as_soon_as_federation_would(root: Path, key: bool) -> None:
    authority = KeyPair(root / "authority" / "ca.crt", root / "authority" / "ca.key")
    signing.make_server(authority, root / "server", federation.INNER_NAMES, days=25)
    if not key:
        authority.private.unlink()
    [told] = [one for one in key_checks.check_keys(root / "server", None) if one.kind != "ok"]
    assert told.kind == "note"
    assert f"24 days left. Renew it: fedcross deploy federation {root} does, with ca.key in" in told.text
    if key:
        assert federation.prepare(root, [])
        assert all(one.kind == "ok" for one in key_checks.check_keys(root / "server", None))


def test_a_copy_of_the_authority_is_not_evidence_of_it_when_it_cannot_be_read(root: Path) -> None:
    for name in PARTS:
        (root / name / "ca.crt").write_bytes(b"junk")
    assert federation.prepare(root, []) == [str(root / name / "ca.crt") for name in PARTS]


def test_the_server_of_another_authority_gets_no_certificate(root: Path, other: Path) -> None:
    """All its devices would refuse it."""
    before = contents(root)
    call = ["server", str(other / "authority"), str(root / "server"), "fl.example.org"]
    assert deploy(call) == 2
    with pytest.raises(
        StorageError, match=r"server/ca\.crt: of another authority than .*other/authority/ca\.crt"
    ) as error:
        authorities.refuse_mixed(other / "authority" / "ca.crt", root / "server")
    assert contents(root) == before
    words = str(error.value).split("on purpose: ")[1].split(", call this")[0]
    subprocess.run(words, shell=True, check=True)
    assert deploy(call) == 0
    assert certificates.check_certificate(root / "server" / "server.crt", root / "server" / "ca.crt")
    after = contents(root)
    assert federation.prepare(root, ["porch"]) == []  # it does not sign back
    assert contents(root) == after
    new = (other / "authority" / "ca.crt").read_bytes()
    assert {path.read_bytes() for path in root.glob("*/ca.crt")} == {new}


@pytest.mark.parametrize("way", ["on", "back"])
def test_federation_does_not_undo_a_change_of_the_authority(root: Path, other: Path, way: str) -> None:
    """Who has the new ca.crt already would be locked out."""
    server = root / "server"
    shutil.copy(other / "authority" / "ca.crt", server / "ca.crt")
    signing.make_server(
        KeyPair(other / "authority" / "ca.crt", other / "authority" / "ca.key"), server, ["superlink", "gateway"]
    )
    before, signed = contents(root), (server / "server.crt").read_bytes()
    with pytest.raises(
        StorageError, match=r"server\.crt: signed by the authority in .*server/ca\.crt, as after"
    ) as error:
        federation.prepare(root, [])
    assert contents(root) == before
    words = str(error.value).split("federation's now: ")[1].split(", then call")[0]
    if way == "back":
        words = str(error.value).split("/authority/ca.crt is: ")[1].split(", then call")[0]
    subprocess.run(words, shell=True, check=True)
    federation.prepare(root, ["porch"])
    assert ((server / "server.crt").read_bytes() == signed) == (way == "on")
    roots = {path.read_bytes() for path in root.glob("*/ca.crt")}
    assert roots == {((other if way == "on" else root) / "authority" / "ca.crt").read_bytes()}
    assert certificates.check_certificate(server / "server.crt", server / "ca.crt")


def test_what_puts_a_devices_ca_crt_right_is_told(root: Path, tmp_path: Path) -> None:
    """After a change of the authority: federation looks at the devices that it is told."""
    shutil.rmtree(root / "authority")
    for name in PARTS:
        (root / name / "ca.crt").unlink()
    signing.make_authority(root / "authority")
    federation.prepare(root, [])
    [told] = doctor(root / "authority", root / "porch", root / "server")
    assert told.startswith(f"{root / 'porch' / 'ca.crt'}: of another authority than {root / 'authority' / 'ca.crt'}.")
    command = told.split("fedcross deploy ")[1].split(" puts it")[0]
    assert command == f"federation {root} --device porch"
    assert deploy(shlex.split(command)) == 0
    assert doctor(root / "authority", root / "porch", root / "server") == []
    bundle = tmp_path / "barn" / "keys"
    new_client(Device("barn", "h:1", 0, 1), root / "authority" / "ca.crt", tmp_path)
    shutil.copy(signing.make_authority(tmp_path / "new").public, bundle)
    [told] = [one.text for one in key_checks.check_one_authority([root / "authority", root / "server", bundle])]
    subprocess.run(shlex.split(told.split("the federation's: ")[1]), check=True)
    assert doctor(root / "authority", root / "server", bundle) == []


@pytest.mark.parametrize("name", ["authority", "authority/ca.crt", "server"])
def test_a_disk_that_is_away_is_asked_for(root: Path, tmp_path: Path, name: str) -> None:
    """The advice to copy a ca.crt there failed."""
    (root / name).rename(tmp_path / "disk")
    (root / name).symlink_to(tmp_path / "stick")
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(StorageError) as caught:
        federation.prepare(root, ["porch"])
    assert str(caught.value) == f"{root / name}: a link to {tmp_path}/stick, which is not there. Is its disk mounted?"
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before
    (tmp_path / "disk").rename(tmp_path / "stick")
    assert federation.prepare(root, ["porch"]) == []
