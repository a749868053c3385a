from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.private_files import check_private, private_folder, write_private
from fedcross.core.trust import certificates, keys, signing
from fedcross.core.trust.keys import SECRET, KeyPair, make_node_key
from tests.support.command import subcommand
from tests.support.disk import largest_file

main = subcommand("deploy")


@pytest.fixture
def authority(tmp_path: Path) -> KeyPair:
    return signing.make_authority(tmp_path / "ca")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(server: KeyPair, trusted: Path, name: str, client: KeyPair | None = None) -> str:
    """Shake hands with a TLS server on loopback; return the verified server's common name, or raise SSLError."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server.public, server.private)
    if client is not None:
        ours.verify_mode = ssl.CERT_REQUIRED
        ours.load_verify_locations(trusted)
    theirs = ssl.create_default_context(cafile=str(trusted))
    # Python 3.13 made this the default: key usages and identifiers must be as RFC 5280 says.
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    if client is not None:
        theirs.load_cert_chain(client.public, client.private)
    near, far = socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError, OSError), ours.wrap_socket(far, server_side=True) as stream:
            stream.send(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with near, theirs.wrap_socket(near, server_hostname=name) as stream:
            if stream.recv(1) != b"x":  # a refused client certificate shows here, not in the handshake
                raise ssl.SSLError("refused")
            subject = dict(pair[0] for pair in stream.getpeercert()["subject"])
            return str(subject["commonName"])
    finally:
        near.close()
        thread.join()


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        pair = signing.make_authority(tmp_path / "ca")
        node = make_node_key(tmp_path / "nodes", "pi-1")
    finally:
        os.umask(before)
    assert mode(tmp_path / "ca") == mode(tmp_path / "nodes") == 0o700
    assert mode(pair.private) == mode(node.private) == 0o600
    assert mode(pair.public) == 0o644
    assert sorted(p.name for p in (tmp_path / "ca").iterdir()) == ["ca.crt", "ca.key"]


def test_authority_signs_no_further_authority(authority: KeyPair) -> None:
    root = certificates.read_certificate(authority.public)
    basic = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert (basic.value.ca, basic.value.path_length) == (True, 0)
    key = root.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)


def test_an_authority_is_never_overwritten(authority: KeyPair) -> None:
    before = authority.private.read_bytes()
    with pytest.raises(StorageError, match="exists here already"):
        signing.make_authority(authority.private.parent)
    assert authority.private.read_bytes() == before


def test_server_certificate(authority: KeyPair, tmp_path: Path) -> None:
    pair = signing.make_server(authority, tmp_path / "server", ["superlink", "fl.example.org", "192.0.2.7"])
    leaf = certificates.read_certificate(pair.public)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["superlink", "fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert leaf.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=90)


@pytest.mark.parametrize("name", ["fl.example.org", "127.0.0.1", "localhost"])
def test_clients_accept_the_server_by_each_name(authority: KeyPair, tmp_path: Path, name: str) -> None:
    server = signing.make_server(authority, tmp_path / "server", ["fl.example.org"])
    assert handshake(server, authority.public, name) == "fl.example.org"


def test_clients_refuse_another_name_and_another_authority(authority: KeyPair, tmp_path: Path) -> None:
    server = signing.make_server(authority, tmp_path / "server", ["fl.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(server, authority.public, "evil.example.org")
    other = signing.make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, other.public, "fl.example.org")


def test_rotated_server_certificate_is_accepted_by_devices_that_know_only_the_authority(
    authority: KeyPair, tmp_path: Path
) -> None:
    old = signing.make_server(authority, tmp_path / "server", ["fl.example.org"], days=1)
    before = certificates.read_certificate(old.public)
    new = signing.make_server(authority, tmp_path / "server", ["fl.example.org"], days=90)
    after = certificates.read_certificate(new.public)
    assert new == old
    assert after.serial_number != before.serial_number
    assert after.public_key() != before.public_key()
    assert after.not_valid_after_utc > before.not_valid_after_utc
    assert handshake(new, authority.public, "fl.example.org") == "fl.example.org"


def test_client_certificates_open_the_gateway_and_server_certificates_do_not(
    authority: KeyPair, tmp_path: Path
) -> None:
    server = signing.make_server(authority, tmp_path / "server", [])
    client = signing.make_client(authority, tmp_path / "devices", "pi-1")
    assert handshake(server, authority.public, "localhost", client) == "localhost"
    with pytest.raises(ssl.SSLError):
        handshake(server, authority.public, "localhost", server)
    stranger = signing.make_client(signing.make_authority(tmp_path / "o"), tmp_path / "s", "pi-1")
    with pytest.raises(ssl.SSLError):
        handshake(server, authority.public, "localhost", stranger)


@pytest.mark.parametrize("name", ["ca", "server", "CA"])
def test_a_device_is_not_called_as_the_authority_or_the_server_is(
    authority: KeyPair, tmp_path: Path, name: str
) -> None:
    before = {path: path.read_bytes() for path in authority.public.parent.iterdir()}
    with pytest.raises(ConfigError, match="authority or the server have it"):
        signing.make_client(authority, authority.public.parent, name)
    assert {path: path.read_bytes() for path in authority.public.parent.iterdir()} == before


def test_a_client_certificate_replaces_no_authority_and_no_server(authority: KeyPair, tmp_path: Path) -> None:
    server = signing.make_server(authority, tmp_path / "server", [])
    for certificate, who in ((authority.public, "an authority"), (server.public, "a server")):
        copied = tmp_path / "d" / "porch.crt"
        private_folder(copied.parent)
        copied.write_bytes(certificate.read_bytes())
        with pytest.raises(StorageError, match=f"the certificate of {who}"):
            signing.make_client(authority, copied.parent, "porch")
        assert copied.read_bytes() == certificate.read_bytes()
    copied.write_bytes(b"damaged")
    assert signing.make_client(authority, copied.parent, "porch").public == copied


def test_a_client_certificate_replaces_no_nodes_key(authority: KeyPair, tmp_path: Path) -> None:
    node = make_node_key(tmp_path, "porch")
    before = node.private.read_bytes()
    with pytest.raises(StorageError, match=r"porch-node\.key: the key of a SuperNode"):
        signing.make_client(authority, tmp_path, "porch-node")
    assert node.private.read_bytes() == before
    signing.make_client(authority, tmp_path, "porch")


@pytest.mark.parametrize("name", ["", "a b", "*.example.org", "1.2.3.4.5", "-x.org", "a..b"])
def test_server_names_that_are_none(authority: KeyPair, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither an IP address nor a host name"):
        signing.make_server(authority, tmp_path / "server", [name])


@pytest.mark.parametrize("days", [0, 91])
def test_leaf_certificates_are_short_lived(authority: KeyPair, tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match="1 to 90 days"):
        signing.make_server(authority, tmp_path / "server", [], days)


def test_a_leaf_does_not_outlive_its_authority(tmp_path: Path) -> None:
    authority = signing.make_authority(tmp_path / "ca", days=3)
    leaf = certificates.read_certificate(signing.make_server(authority, tmp_path / "server", []).public)
    assert leaf.not_valid_after_utc == certificates.read_certificate(authority.public).not_valid_after_utc


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620])
def test_a_key_others_can_touch_is_refused(authority: KeyPair, tmp_path: Path, bits: int) -> None:
    authority.private.chmod(bits)
    with pytest.raises(StorageError, match=f"mode {bits:o}.*chmod 600"):
        signing.make_server(authority, tmp_path / "server", [])


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir(mode=0o755)
    (tmp_path / "ca").chmod(0o755)
    with pytest.raises(StorageError, match="chmod 700"):
        signing.make_authority(tmp_path / "ca")


def test_a_key_of_another_authority_is_refused(authority: KeyPair, tmp_path: Path) -> None:
    other = signing.make_authority(tmp_path / "other")
    with pytest.raises(StorageError, match="not the key of"):
        signing.make_server(KeyPair(authority.public, other.private), tmp_path / "server", [])


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such key file"):
        check_private(tmp_path / "none")
    write_private(tmp_path / "junk", b"junk")
    with pytest.raises(StorageError, match="no PEM certificate"):
        certificates.read_certificate(tmp_path / "junk")
    with pytest.raises(StorageError, match="cannot be made"):
        private_folder(tmp_path / "junk" / "below")


def test_check_tells_expiry_and_strangers(authority: KeyPair, tmp_path: Path) -> None:
    pair = signing.make_server(authority, tmp_path / "server", [], days=2)
    now = datetime.now(UTC)
    left = certificates.check_certificate(pair.public, authority.public)
    assert timedelta(days=2) - timedelta(minutes=1) < left <= timedelta(days=2)
    with pytest.raises(StorageError, match=r"expired on .* Make it again: fedcross deploy federation FOLDER\.$"):
        certificates.check_certificate(pair.public, authority.public, now + timedelta(days=2, minutes=1))
    (tmp_path / "authority").mkdir(exist_ok=True)  # the server's folder is a federation's
    with pytest.raises(StorageError, match=f"fedcross deploy federation {tmp_path}"):
        certificates.check_certificate(pair.public, authority.public, now + timedelta(days=2, minutes=1))
    with pytest.raises(StorageError, match="clock"):
        certificates.check_certificate(pair.public, authority.public, now - timedelta(days=1))
    other = signing.make_authority(tmp_path / "other")
    with pytest.raises(StorageError, match="not signed by"):
        certificates.check_certificate(pair.public, other.public)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o022)
    try:
        ca, server, devices = (str(tmp_path / name) for name in ("ca", "server", "devices"))
        assert main(["authority", ca]) == 0
        assert main(["server", ca, server, "superlink", "--days", "3"]) == 0
        assert main(["client", ca, devices, "pi-1"]) == 0
        assert main(["node", devices, "pi-1"]) == 0
        capsys.readouterr()
        checked = [f"{server}/server.crt", f"{server}/server.key", f"{devices}/pi-1.crt", f"{devices}/pi-1-node.key"]
        assert main(["check", f"{ca}/ca.crt", *checked]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("2 days left, rotate it now: fedcross deploy federation")
        assert lines[2].endswith("89 days left")
        Path(f"{server}/server.key").chmod(0o644)
        assert main(["check", f"{ca}/ca.crt", *checked]) == 2
        assert "mode 644" in capsys.readouterr().err
        assert main(["authority", ca]) == 2
    finally:
        os.umask(before)


def test_a_disk_that_is_full_leaves_no_half_pair(tmp_path: Path) -> None:
    """Half an authority would be in the way of the next try, and half a node key too."""
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        signing.make_authority(tmp_path / "ca")
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        make_node_key(tmp_path / "nodes", "pi-1")
    assert not list((tmp_path / "ca").iterdir()) + list((tmp_path / "nodes").iterdir())
    authority = signing.make_authority(tmp_path / "ca")
    server = signing.make_server(authority, tmp_path / "server", [])
    before = {path: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        signing.make_server(authority, tmp_path / "server", [])
    assert {path: path.read_bytes() for path in server.public.parent.iterdir()} == before


def test_an_authoritys_key_without_its_certificate_is_kept(authority: KeyPair) -> None:
    authority.public.unlink()
    with pytest.raises(StorageError, match=r"without its ca\.crt\. Bring that back, or remove the key"):
        signing.make_authority(authority.private.parent)
    assert authority.private.exists()


@pytest.mark.parametrize("days", ["-5", "0", "99999999"])
def test_an_authority_lives_for_some_days(tmp_path: Path, days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["authority", str(tmp_path / "ca"), "--days", days]) == 2
    assert f"days={days}: an authority lives 1 to 36500 days" in capsys.readouterr().err
    assert not (tmp_path / "ca").exists()


def test_check_finds_a_key_of_another_certificate(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = signing.make_server(authority, tmp_path / "server", [])
    other = signing.make_server(authority, tmp_path / "other", [])
    assert main(["check", str(authority.public), str(pair.public), str(pair.private)]) == 0
    pair.private.write_bytes(other.private.read_bytes())
    assert main(["check", str(authority.public), str(pair.public), str(pair.private)]) == 2
    assert f"{pair.private}: this is not the key of {pair.public}" in capsys.readouterr().err
    pair.private.write_bytes(b"junk")
    with pytest.raises(StorageError, match="no unencrypted PEM private key"):
        certificates.check_key(pair.private)


@pytest.mark.parametrize("name", ["superexec", "SuperExec"])
def test_a_client_certificate_replaces_no_secret(authority: KeyPair, tmp_path: Path, name: str) -> None:
    write_private(tmp_path / SECRET, bytes(32))
    with pytest.raises(ConfigError, match="authority or the server have it"):
        signing.make_client(authority, tmp_path, name)
    assert (tmp_path / SECRET).read_bytes() == bytes(32)


def test_check_refuses_what_is_no_key(authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = make_node_key(tmp_path, "porch")
    write_private(tmp_path / SECRET, bytes(32))
    good = [node.private, tmp_path / SECRET]
    assert main(["check", str(authority.public), *map(str, good)]) == 0
    capsys.readouterr()
    bad, empty, damaged = (tmp_path / name for name in ("bad.key", "empty.key", "barn-node.key"))
    write_private(bad, b"x\n")
    write_private(empty, b"")
    write_private(damaged, node.private.read_bytes()[:200])
    write_private(tmp_path / SECRET, b"")
    checked = [bad, empty, damaged, tmp_path / SECRET]
    assert main(["check", str(authority.public), *map(str, checked)]) == 2
    said = capsys.readouterr()
    assert "private\n" not in said.out
    assert f"{bad}: this is no unencrypted PEM private key" in said.err
    assert f"{empty}: this is no unencrypted PEM private key" in said.err
    assert f"{damaged}: this is no unencrypted OpenSSH private key" in said.err
    assert f"{SECRET}: 0 bytes, a secret has 16 or more" in said.err


def test_check_compares_a_key_with_the_certificate_that_is_named(
    authority: KeyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (signing.make_server(authority, tmp_path / name, []) for name in ("one", "other"))
    both = [str(path) for pair in (one, other) for path in (pair.public, pair.private)]
    assert main(["check", str(authority.public), *both]) == 0
    assert main(["check", str(authority.public), str(one.public), str(other.private)]) == 2
    assert f"{other.private}: this is not the key of {one.public}" in capsys.readouterr().err


def test_a_key_that_this_user_may_not_read(authority: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StorageError, match=r"Permission denied, user \d+ may not read it\. Run as the owner"):
        check_private(authority.private)


def test_only_an_authority_signs(authority: KeyPair, tmp_path: Path) -> None:
    pair = signing.make_server(authority, tmp_path / "server", [])
    with pytest.raises(StorageError, match=r"server\.crt: not the certificate of an authority"):
        signing.make_client(pair, tmp_path / "d", "porch")
    both = tmp_path / "mix.crt"
    both.write_bytes(authority.public.read_bytes() + authority.private.read_bytes())
    assert certificates.authority_text(both) == authority.public.read_bytes()


def test_what_cannot_be_signed_leaves_no_folder(authority: KeyPair, tmp_path: Path) -> None:
    authority.private.rename(tmp_path / "away.key")
    for make in (
        lambda: signing.make_client(authority, tmp_path / "d", "porch"),
        lambda: signing.make_server(authority, tmp_path / "d", []),
    ):
        with pytest.raises(StorageError, match="no such key file"):
            make()
    (tmp_path / "away.key").rename(authority.private)
    with pytest.raises(ConfigError, match="days=91"):
        signing.make_client(authority, tmp_path / "d", "porch", days=91)
    assert sorted(path.name for path in authority.public.parent.iterdir()) == ["ca.crt", "ca.key"]
    assert not (tmp_path / "d").exists()


def test_what_root_makes_belongs_to_the_owner_of_the_folder(
    authority: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service's user could not use its keys any more after root has renewed them."""
    own = tmp_path.stat()
    whose = (own.st_uid, own.st_gid)
    given: list[tuple[Path | int, tuple[int, int]]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "chown", lambda file, *owner, **_: given.append((file, owner)))
    signing.make_client(authority, tmp_path / "a" / "b", "porch")
    assert given == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    signing.make_client(authority, tmp_path / "c" / "d", "porch")
    assert [owner for _, owner in given] == [whose] * 6
    named = [file for file, _ in given if isinstance(file, Path)]  # the others: the pair, and the authority's list
    assert named == [authority.public.with_name(".lock"), tmp_path / "c", tmp_path / "c" / "d"]


def test_where_root_may_not_give_files_away_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", refused)
    assert signing.make_authority(tmp_path / "ca").private.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_makes_keys_for_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1235)
    authority = signing.make_authority(tmp_path / "ca")
    signing.make_client(authority, tmp_path / "d", "porch")
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in tmp_path.rglob("*")}
    assert (owners, (tmp_path / "d").stat().st_mode & 0o777) == ({(1234, 1235)}, 0o700)


def test_an_authority_that_ends_soon_is_not_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = signing.make_authority(tmp_path / "ca", days=3)
    assert main(["check", str(authority.public), str(authority.public)]) == 0
    assert "days left, make a new authority and hand its ca.crt to all devices" in capsys.readouterr().out


def test_an_authoritys_key_that_is_elsewhere_is_to_be_brought_back(authority: KeyPair, tmp_path: Path) -> None:
    authority.private.rename(tmp_path / "safe.key")
    with pytest.raises(StorageError, match="Bring the authority's key back for this call"):
        signing.make_server(authority, tmp_path / "server", ["a.org"])


def test_of_two_that_make_an_authority_at_once_one_is_told_that_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each waits before it writes, so that without a lock both would have made one."""
    save = keys.save

    def slowly(pair: KeyPair, public: bytes, key: ec.EllipticCurvePrivateKey) -> None:
        time.sleep(0.1)
        save(pair, public, key)

    monkeypatch.setattr(keys, "save", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: main(["authority", str(tmp_path / "ca")]), range(2))) == [0, 2]
    assert "an authority exists here already" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "ca").iterdir()} == {"ca.crt", "ca.key"}


def test_check_tells_of_an_authority_90_days_before_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for days, told in ((92, ""), (80, ", make a new authority and hand its ca.crt to all devices")):
        path = signing.make_authority(tmp_path / str(days), days).public
        assert main(["check", str(path), str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: {days - 1} days left{told}\n"
