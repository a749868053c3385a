from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from fedcross.core.errors import StorageError
from fedcross.core.trust import certificates, issued, signing
from fedcross.core.trust.keys import KeyPair
from fedcross.core.trust.revoked import read
from fedcross.deploy import revocation
from fedcross.deploy.revocation import check_revoked, revoke
from tests.support.command import subcommand


@pytest.fixture
def authority(tmp_path: Path) -> KeyPair:
    return signing.make_authority(tmp_path / "ca")


def accepted(server: KeyPair, client: KeyPair, trusted: Path, crl: Path) -> bool:
    """Return whether a gateway that reads `crl` lets `client` in."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server.public, server.private)
    ours.verify_mode = ssl.CERT_REQUIRED
    ours.load_verify_locations(trusted)
    ours.load_verify_locations(crl)
    ours.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    theirs = ssl.create_default_context(cafile=str(trusted))
    theirs.load_cert_chain(client.public, client.private)
    near, far = socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError, OSError), ours.wrap_socket(far, server_side=True) as stream:
            stream.send(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with near, theirs.wrap_socket(near, server_hostname="localhost") as stream:
            return stream.recv(1) == b"x"
    except (ssl.SSLError, OSError):
        return False
    finally:
        near.close()
        thread.join()


def test_a_revoked_certificate_is_refused_and_others_are_not(authority: KeyPair, tmp_path: Path) -> None:
    server = signing.make_server(authority, tmp_path / "server", [])
    good = signing.make_client(authority, tmp_path / "d", "good")
    bad = signing.make_client(authority, tmp_path / "d", "bad")
    crl, new = revoke(authority, None)
    assert new == 0
    assert accepted(server, good, authority.public, crl)
    assert accepted(server, bad, authority.public, crl)
    revoke(authority, bad.public)
    assert accepted(server, good, authority.public, crl)
    assert not accepted(server, bad, authority.public, crl)


def test_the_list_grows_and_is_never_taken_from_somebody_else(authority: KeyPair, tmp_path: Path) -> None:
    first = signing.make_client(authority, tmp_path / "d", "a")
    second = signing.make_client(authority, tmp_path / "d", "b")
    assert revoke(authority, first.public)[1] == 1
    path, new = revoke(authority, second.public)
    assert new == 1
    assert revoke(authority, second.public) == (path, 0)
    serials = {certificates.read_certificate(pair.public).serial_number for pair in (first, second)}
    assert {entry.serial_number for entry in x509.load_pem_x509_crl(path.read_bytes())} == serials
    other = signing.make_authority(tmp_path / "other")
    stranger = signing.make_client(other, tmp_path / "o", "a")
    path.write_bytes(revoke(other, stranger.public)[0].read_bytes())
    with pytest.raises(StorageError, match="not signed by the authority"):
        revoke(authority, None)


def test_a_foreign_certificate_cannot_be_revoked(authority: KeyPair, tmp_path: Path) -> None:
    other = signing.make_authority(tmp_path / "other")
    server = signing.make_server(other, tmp_path / "server", [])
    leaf = certificates.read_certificate(server.public)
    assert leaf.issuer == certificates.read_certificate(authority.public).subject  # the same name, another key
    with pytest.raises(StorageError, match="not signed by"):
        revoke(authority, server.public)


def serial(pair: KeyPair) -> int:
    return certificates.read_certificate(pair.public).serial_number


def listed(crl: Path) -> set[int]:
    return {entry.serial_number for entry in x509.load_pem_x509_crl(crl.read_bytes())}


def test_what_a_device_got_before_is_revoked_too(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thief may have the certificate that another one of the same name has replaced."""
    serials = [serial(signing.make_client(authority, tmp_path / "d", "porch")) for _ in range(3)]
    other = signing.make_client(authority, tmp_path / "d", "barn")
    crl = authority.public.with_name("ca.crl")
    file = tmp_path / "d" / "porch.crt"
    assert subcommand("deploy")(["revoke-certificate", str(crl.parent), str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{crl}: newly revoked with {file}: 3 ")
    assert listed(crl) == set(serials)
    assert serial(other) not in listed(crl)


def test_an_authority_of_an_earlier_version_revokes_what_it_knows(authority: KeyPair, tmp_path: Path) -> None:
    old = signing.make_client(authority, tmp_path / "d", "porch")
    list_of_it, first = authority.public.with_name(issued.FILE), serial(old)
    list_of_it.unlink()
    assert revoke(authority, old.public)[1] == 1
    new = signing.make_client(authority, tmp_path / "d", "porch")  # the list gets what this one replaces
    assert {one.serial for one in issued.kept(list_of_it.parent)} == {first, serial(new)}


def test_the_list_of_serials_forgets_expired_ones_and_is_never_guessed(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    path = authority.public.with_name(issued.FILE)
    told = [*json.loads(path.read_text()), {"serial": "ff", "name": "porch", "until": "2020-01-01T00:00:00+00:00"}]
    path.write_text(json.dumps(told))
    signing.make_client(authority, tmp_path / "d", "barn")
    assert [one["name"] for one in json.loads(path.read_text())] == ["porch", "barn"]
    for damaged in ("[{", "{}x", '[{"serial": 1}]', "[1]"):
        path.write_text(damaged)
        with pytest.raises(StorageError, match="no readable list of certificates"):
            revoke(authority, porch.public)


def test_revocations_at_the_same_time_are_all_kept(
    authority: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits after it has read the list, so that without a lock the last one to write would win."""
    from fedcross.deploy import revocation

    pairs = [signing.make_client(authority, tmp_path / "d", name) for name in ("a", "b", "c")]
    revoke(authority, None)
    read = revocation.dates

    def slowly(path: Path, root: x509.Certificate) -> dict[int, datetime]:
        found = read(path, root)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(revocation, "dates", slowly)
    threads = [threading.Thread(target=revoke, args=(authority, pair.public)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listed(authority.public.with_name("ca.crl")) == set(map(serial, pairs))


def test_an_authority_in_a_folder_that_cannot_be_written(authority: KeyPair, tmp_path: Path) -> None:
    authority.public.with_name(issued.LOCK).mkdir()
    with pytest.raises(StorageError, match="keeps its lists of certificates there"):
        revoke(authority, None)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StorageError, match="cannot be read"):
        signing.make_client(KeyPair(tmp_path / "none" / "ca.crt", authority.private), tmp_path / "d", "a")
    assert not (tmp_path / "none").exists()


def test_a_list_that_was_lost_is_made_again(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    crl, _ = revoke(authority, porch.public)
    [before] = x509.load_pem_x509_crl(crl.read_bytes())
    crl.unlink()
    assert revoke(authority, None) == (crl, 0)
    [after] = x509.load_pem_x509_crl(crl.read_bytes())
    first = serial(porch)
    assert after.serial_number == before.serial_number == first
    assert after.revocation_date_utc == before.revocation_date_utc
    signing.make_client(authority, tmp_path / "d", "porch")  # takes nothing off
    crl.unlink()
    assert listed(revoke(authority, None)[0]) == {first}


def test_what_an_earlier_version_revoked_is_recorded(authority: KeyPair, tmp_path: Path) -> None:
    porch, barn = (signing.make_client(authority, tmp_path / "d", name) for name in ("porch", "barn"))
    path = authority.public.with_name(issued.FILE)
    old = json.loads(path.read_text())
    crl, _ = revoke(authority, porch.public)
    revoke(authority, barn.public)
    path.write_text(json.dumps(old[:1]))  # no record of what is revoked, and barn is not on it
    assert revoke(authority, None) == (crl, 0)
    crl.unlink()
    assert listed(revoke(authority, None)[0]) == {serial(porch), serial(barn)}


def test_check_misses_a_lost_list(authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    check = ["check", str(authority.public), str(authority.public)]
    assert subcommand("deploy")(check) == 0  # nothing is revoked, and there is no list
    revoke(authority, porch.public)[0].unlink()
    assert subcommand("deploy")(check) == 2
    assert f"ca.crl: missing, though {issued.FILE} records 1 revoked. Make it again" in capsys.readouterr().err
    revoke(authority, None)
    assert subcommand("deploy")(check) == 0


def test_a_link_that_leads_nowhere_is_no_new_list(authority: KeyPair, tmp_path: Path) -> None:
    crl = authority.public.with_name("ca.crl")
    crl.symlink_to(tmp_path / "none")
    with pytest.raises(
        StorageError, match=r"ca\.crl: a link to .*none, which is not there\. Is its disk mounted\?"
    ) as error:
        revoke(authority, None)
    assert crl.is_symlink()
    with pytest.raises(StorageError, match=r"Is its disk mounted\?"):
        check_revoked(authority.public, authority.public)
    one, two, three, four = str(error.value).split("link it: ")[1].split(" && ")
    subprocess.run(shlex.split(one), check=True)
    assert subcommand("deploy")(shlex.split(two)[2:]) == 0
    subprocess.run(f"{three} && {four}", shell=True, check=True)
    assert crl.is_symlink()
    assert listed(tmp_path / "none") == set()
    crl.unlink()
    crl.symlink_to(tmp_path / "away" / "ca.crl")
    with pytest.raises(StorageError, match=r"away/ca\.crl, whose folder is not there\. Is its disk mounted\?"):
        revoke(authority, None)


def test_a_list_that_cannot_be_read_or_is_linked_is_not_to_be_removed(
    authority: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway reads it where the link leads: a new list in the link's place would reach nobody."""
    crl, _ = revoke(authority, signing.make_client(authority, tmp_path / "d", "porch").public)
    crl.rename(tmp_path / "gateways")
    crl.symlink_to(tmp_path / "gateways")
    (tmp_path / "gateways").write_bytes(b"junk")
    with pytest.raises(StorageError, match=rf"It is a link: put the list's newest copy at {tmp_path}/gateways, then"):
        revoke(authority, None)

    def refused(path: Path) -> bytes:
        raise PermissionError(13, os.strerror(13), str(path))

    root = certificates.read_certificate(authority.public)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(StorageError, match=r"ca\.crl: cannot be read \(Permission denied\)\. Run as its owner\.$"):
        read(crl, root)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the clock that revoking, and the record, go by: so many days after now."""

    def set_to(days: int) -> None:
        moment = datetime.now(UTC) + timedelta(days=days)

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Clock:
                return cls.fromtimestamp(moment.timestamp(), tz)

        for module in (revocation, issued):
            monkeypatch.setattr(module, "datetime", Clock)

    return set_to


@pytest.mark.parametrize(("days", "says"), [(-100, "valid from .* is this clock right"), (1000, "expired on .* clock")])
def test_nothing_is_revoked_with_a_clock_outside_the_authoritys_dates(
    authority: KeyPair, tmp_path: Path, at: Callable[[int], None], days: int, says: str
) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    record = authority.public.with_name(issued.FILE)
    before = record.read_bytes()
    at(days)
    with pytest.raises(StorageError, match=says):
        revoke(authority, porch.public)
    assert record.read_bytes() == before
    assert not authority.public.with_name("ca.crl").exists()


@pytest.mark.parametrize("days", [95, 700])
def test_a_fast_clock_takes_no_valid_certificate_off_the_record(
    authority: KeyPair, tmp_path: Path, at: Callable[[int], None], days: int
) -> None:
    first, second = (serial(signing.make_client(authority, tmp_path / "d", "porch")) for _ in range(2))
    other = signing.make_client(authority, tmp_path / "d", "barn")
    at(days)
    revoke(authority, other.public)
    at(0)
    crl, new = revoke(authority, tmp_path / "d" / "porch.crt")
    assert new == 2
    assert {first, second} <= listed(crl)


def test_a_link_in_the_place_of_the_lock_is_told(authority: KeyPair, tmp_path: Path) -> None:
    authority.public.with_name(issued.LOCK).symlink_to(tmp_path / "x")
    with pytest.raises(StorageError, match=r"\.lock: a link in the place of a lock\. Remove it"):
        revoke(authority, None)


def test_a_record_on_a_disk_that_is_away_is_not_begun_anew(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of all that was signed would be a new file in the mount point."""
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    record = authority.public.with_name(issued.FILE)
    record.rename(tmp_path / "away.json")
    record.symlink_to(tmp_path / "none.json")
    for call in (
        ["client", str(record.parent), str(tmp_path / "d"), "barn"],
        ["revoke-certificate", str(record.parent)],
    ):
        assert subcommand("deploy")(call) == 2
        said = capsys.readouterr().err
        assert "issued.json: a link to" in said
        assert "which is not there. Is its disk mounted?" in said
    assert not (tmp_path / "none.json").exists()
    subprocess.run(said.split("never was there: ")[1].split("\n")[0], shell=True, check=True)
    assert revoke(authority, porch.public)[1] == 1


def test_a_damaged_list_is_told_and_made_again_once_it_is_removed(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    crl, _ = revoke(authority, porch.public)
    crl.write_bytes(b"junk")
    again = f"fedcross deploy revoke-certificate {crl.parent}"
    with pytest.raises(StorageError, match=rf"Remove it, then {again} makes it again from what issued\.json .* \(1;"):
        revoke(authority, None)
    crl.unlink()
    assert listed(revoke(authority, None)[0]) == {serial(porch)}


def test_an_older_list_is_told_and_signed_again(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who brings a copy back would let in again what was revoked since."""
    porch, attic = (signing.make_client(authority, tmp_path / "d", name) for name in ("porch", "attic"))
    crl, _ = revoke(authority, attic.public)
    copy = crl.read_bytes()
    revoke(authority, porch.public)
    crl.write_bytes(copy)
    for file in (porch.public, crl, authority.public):
        assert subcommand("deploy")(["check", str(authority.public), str(file)]) == 2
        said = capsys.readouterr().err
        assert f"{crl}: lacks 1 of the 2 that issued.json records as revoked, as an older copy does. Sign it" in said
    assert subcommand("deploy")(["check", str(authority.public), str(attic.public)]) == 2
    assert f"{attic.public}: revoked on " in capsys.readouterr().err
    assert subcommand("deploy")(["revoke-certificate", str(crl.parent)]) == 0  # as the message says
    assert listed(crl) == {serial(porch), serial(attic)}
    assert subcommand("deploy")(["check", str(authority.public), str(crl)]) == 0


def test_a_damaged_list_without_a_record_of_it_is_to_be_named_again(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    crl, _ = revoke(authority, porch.public)
    crl.write_bytes(b"junk")
    authority.public.with_name(issued.FILE).unlink()
    with pytest.raises(StorageError, match=rf"remove it and name each one: .*certificate {crl.parent} FILE\.crt$"):
        revoke(authority, None)


def test_a_new_certificate_does_not_forget_what_is_revoked(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    crl, _ = revoke(authority, porch.public)
    record = authority.public.with_name(issued.FILE)
    record.unlink()
    signing.make_client(authority, tmp_path / "d", "attic")
    assert {one.serial for one in issued.kept(crl.parent) if one.revoked is not None} == {serial(porch)}
    crl.unlink()
    with pytest.raises(StorageError, match=r"ca\.crl: missing, though issued\.json records 1 revoked"):
        check_revoked(porch.public, authority.public)
    assert listed(revoke(authority, None)[0]) == {serial(porch)}
    crl.write_bytes(b"junk")
    signing.make_client(authority, tmp_path / "d", "barn")  # the record has what was on the list
    record.unlink()
    with pytest.raises(StorageError, match="no readable list of revoked certificates"):
        signing.make_client(authority, tmp_path / "d", "shed")
    assert not (tmp_path / "d" / "shed.crt").exists()


def test_a_file_that_is_revoked_again_does_not_shut_out_the_device_that_has_a_new_one(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    old = tmp_path / "old.crt"
    old.write_bytes(porch.public.read_bytes())
    crl, _ = revoke(authority, old)
    new = signing.make_client(authority, tmp_path / "d", "porch")
    assert subcommand("deploy")(["revoke-certificate", str(crl.parent), str(old)]) == 0
    assert "0 (it was before; what its device got since is valid)" in capsys.readouterr().out
    assert serial(new) not in listed(crl)
    assert revoke(authority, new.public)[1] == 1


def test_a_servers_certificate_is_not_revoked(authority: KeyPair, tmp_path: Path) -> None:
    server = signing.make_server(authority, tmp_path / "server", [])
    with pytest.raises(StorageError, match=r"devices read no list of revoked ones\. .* make a new authority"):
        revoke(authority, server.public)
    assert not authority.public.with_name("ca.crl").exists()


def test_one_bad_file_keeps_no_other_one_off_the_list(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (signing.make_client(authority, tmp_path / "d", name) for name in ("a", "b"))
    both = tmp_path / "both.crt"
    both.write_bytes(first.public.read_bytes() + second.public.read_bytes())
    files = [str(both), str(tmp_path / "none.crt"), str(second.public)]
    assert subcommand("deploy")(["revoke-certificate", str(authority.public.parent), *files]) == 2
    said = capsys.readouterr().err
    assert f"{both}: 2 certificates in one file" in said
    assert "none.crt: this certificate cannot be read" in said
    assert listed(authority.public.with_name("ca.crl")) == {serial(second)}


def test_a_record_that_cannot_be_read_says_why(authority: KeyPair, tmp_path: Path) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    path = authority.public.with_name(issued.FILE)
    path.write_text("[{")
    with pytest.raises(StorageError, match="or remove it: then only the certificates whose files you name"):
        revoke(authority, porch.public)
    path.unlink()
    assert revoke(authority, porch.public)[1] == 1
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match=r"cannot be read \(Is a directory\)\. Run as the owner"):
        revoke(authority, porch.public)


def test_check_finds_what_is_revoked_and_how_long_the_list_holds(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    porch, barn = (signing.make_client(authority, tmp_path / "d", name) for name in ("porch", "barn"))
    crl, _ = revoke(authority, porch.public)
    files = [str(path) for path in (barn.public, crl, porch.public)]
    assert subcommand("deploy")(["check", str(authority.public), *files]) == 2
    said = capsys.readouterr()
    assert [line.split(": ")[1] for line in said.out.splitlines()] == ["89 days left"] * 2
    assert f"{porch.public}: revoked on " in said.err
    revoke(authority, None, days=3)
    assert subcommand("deploy")(["check", str(authority.public), str(crl)]) == 0
    assert "2 days left, sign it again with fedcross deploy revoke-certificate" in capsys.readouterr().out
    revoke(authority, None, days=0)
    assert subcommand("deploy")(["check", str(authority.public), str(crl)]) == 2
    assert "so a gateway that reads it refuses every client" in capsys.readouterr().err


def test_a_lost_record_is_told_and_stays_told_for_what_it_did_not_have(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thief has porch's first certificate, of which nobody but the lost record knew."""
    first = serial(signing.make_client(authority, tmp_path / "d", "porch"))
    second = signing.make_client(authority, tmp_path / "d", "porch")
    barn = signing.make_client(authority, tmp_path / "d", "barn")
    crl, _ = revoke(authority, None)
    authority.public.with_name(issued.FILE).unlink()
    command = ["revoke-certificate", str(crl.parent)]
    assert subcommand("deploy")([*command, str(second.public), str(barn.public)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    for line in said:
        assert "1 (issued.json did not have it, so it may lack others of its device too: revoke each of them" in line
    assert first not in listed(crl)
    new = signing.make_client(authority, tmp_path / "d", "barn")
    assert subcommand("deploy")([*command, str(new.public)]) == 0
    assert "1 (all of its device in issued.json)" in capsys.readouterr().out


def test_a_lost_authoritys_key_is_to_be_brought_back(authority: KeyPair) -> None:
    authority.private.unlink()
    with pytest.raises(StorageError, match="Bring the authority's key back for this call"):
        revoke(authority, None)
