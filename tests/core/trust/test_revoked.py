"""Lists of revoked certificates that a gateway does not take, or that are earlier than another one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from fedcross.core.errors import StorageError
from fedcross.core.trust import signing
from fedcross.core.trust.keys import KeyPair
from fedcross.core.trust.revoked import number
from fedcross.deploy import revocation
from fedcross.deploy.revocation import check_list, check_revoked, revoke
from fedcross.server.commands import key_checks
from tests.support.command import subcommand

deploy = subcommand("deploy")


@pytest.fixture
def authority(tmp_path: Path) -> KeyPair:
    return signing.make_authority(tmp_path / "ca")


def doctor(*folders: Path) -> list[str]:
    found = [one for folder in folders for one in key_checks.check_keys(folder, None)]
    return [one.text for one in (*found, *key_checks.check_one_authority(folders)) if one.kind == "FAULT"]


def test_a_list_that_a_fast_clock_has_signed_is_a_fault(
    authority: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway refuses every client with it: OpenSSL says that it is not valid yet."""
    later = datetime.now(UTC) + timedelta(days=10)

    class Fast(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fast:
            return cls.fromtimestamp(later.timestamp(), tz)

    with monkeypatch.context() as patch:
        patch.setattr(revocation, "datetime", Fast)
        path, _ = revoke(authority, None)
    with pytest.raises(StorageError, match=r"refuses every client until then; is this clock right\?"):
        check_list(path, authority.public)
    assert deploy(["check", str(authority.public), str(path)]) == 2
    assert "is this clock right?" in capsys.readouterr().err
    [told] = doctor(tmp_path / "ca")
    assert told.endswith(f"Sign it again: fedcross deploy revoke-certificate {tmp_path / 'ca'}")
    early = number(x509.load_pem_x509_crl(path.read_bytes()))
    assert deploy(["revoke-certificate", str(tmp_path / "ca")]) == 0
    assert doctor(tmp_path / "ca") == []
    assert number(x509.load_pem_x509_crl(path.read_bytes())) == early + 1  # it is the later list all the same


@pytest.mark.parametrize("renewed", [False, True])
def test_an_older_copy_of_the_authoritys_folder_shows_beside_the_gateways_list(
    authority: KeyPair, tmp_path: Path, renewed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    attic, porch = (signing.make_client(authority, tmp_path / "d", name).public for name in ("attic", "porch"))
    revoke(authority, attic)
    shutil.copytree(tmp_path / "ca", tmp_path / "older")
    path, _ = revoke(authority, porch)
    gateway = tmp_path / "gateway"
    gateway.mkdir(mode=0o700)
    for name in ("ca.crl", "ca.crt"):
        shutil.copy(tmp_path / "ca" / name, gateway)
    if renewed:  # its number may be the higher one then
        assert deploy(["revoke-certificate", str(tmp_path / "older")]) == 0
        assert deploy(["revoke-certificate", str(tmp_path / "older")]) == 0
    old = tmp_path / "older" / "ca.crl"
    check_revoked(porch, tmp_path / "older" / "ca.crt")  # the list and the record agree
    assert deploy(["check", str(authority.public), str(gateway / "ca.crl"), str(path)]) == 0
    assert deploy(["check", str(authority.public), str(gateway / "ca.crl"), str(old)]) == 2
    assert f"{old}: an earlier list than {gateway / 'ca.crl'}, 1 that are" in capsys.readouterr().err
    assert doctor(tmp_path / "ca", gateway) == []
    [told] = doctor(tmp_path / "older", gateway)
    subprocess.run(shlex.split(told.split("there: ")[1].split(" && ")[0]), check=True)
    assert deploy(["revoke-certificate", *shlex.split(told.split(" && ")[1])[3:]]) == 0
    with pytest.raises(StorageError, match="revoked on"):
        check_revoked(porch, tmp_path / "older" / "ca.crt")
    [told] = doctor(tmp_path / "older", gateway)
    assert told.startswith(f"{gateway / 'ca.crl'}: an earlier list than {old}, 0 that are")
    assert told.endswith(f"Copy that one there: cp {old} {gateway / 'ca.crl'}")


def test_two_lists_that_each_lack_something_are_put_together(authority: KeyPair, tmp_path: Path) -> None:
    attic, porch = (signing.make_client(authority, tmp_path / "d", name).public for name in ("attic", "porch"))
    shutil.copytree(tmp_path / "ca", tmp_path / "older")
    revoke(authority, porch)
    revoke(KeyPair(tmp_path / "older" / "ca.crt", tmp_path / "older" / "ca.key"), attic)
    (tmp_path / "ca" / "issued.json").unlink()  # as at a gateway
    [told] = doctor(tmp_path / "ca", tmp_path / "older")
    assert told.startswith(
        f"{tmp_path / 'older' / 'ca.crl'}: an earlier list than {tmp_path / 'ca' / 'ca.crl'}, 1 that"
    )
    shutil.copy(tmp_path / "ca" / "ca.crl", tmp_path / "older")
    assert deploy(["revoke-certificate", str(tmp_path / "older")]) == 0
    for one in (attic, porch):
        with pytest.raises(StorageError, match="revoked on"):
            check_revoked(one, tmp_path / "older" / "ca.crt")


def test_lists_of_two_authorities_are_not_compared(authority: KeyPair, tmp_path: Path) -> None:
    other = signing.make_authority(tmp_path / "other")
    revoke(authority, None)
    revoke(other, signing.make_client(other, tmp_path / "d", "porch").public)
    assert all("earlier" not in one for one in doctor(tmp_path / "ca", tmp_path / "other"))
