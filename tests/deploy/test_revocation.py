from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from fedcross.core import keys as certificates
from fedcross.core.errors import StorageError
from fedcross.core.keys import KeyPair
from fedcross.deploy.revocation import revoke


@pytest.fixture
def authority(tmp_path: Path) -> KeyPair:
    return certificates.make_authority(tmp_path / "ca")


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
    server = certificates.make_server(authority, tmp_path / "server", [])
    good = certificates.make_client(authority, tmp_path / "d", "good")
    bad = certificates.make_client(authority, tmp_path / "d", "bad")
    crl = revoke(authority, None)
    assert accepted(server, good, authority.public, crl)
    assert accepted(server, bad, authority.public, crl)
    revoke(authority, bad.public)
    assert accepted(server, good, authority.public, crl)
    assert not accepted(server, bad, authority.public, crl)


def test_the_list_grows_and_is_never_taken_from_somebody_else(authority: KeyPair, tmp_path: Path) -> None:
    first = certificates.make_client(authority, tmp_path / "d", "a")
    second = certificates.make_client(authority, tmp_path / "d", "b")
    revoke(authority, first.public)
    path = revoke(authority, second.public)
    revoke(authority, second.public)
    serials = {certificates.read_certificate(pair.public).serial_number for pair in (first, second)}
    assert {entry.serial_number for entry in x509.load_pem_x509_crl(path.read_bytes())} == serials
    other = certificates.make_authority(tmp_path / "other")
    stranger = certificates.make_client(other, tmp_path / "o", "a")
    path.write_bytes(revoke(other, stranger.public).read_bytes())
    with pytest.raises(StorageError, match="not signed by the authority"):
        revoke(authority, None)


def test_a_foreign_certificate_cannot_be_revoked(authority: KeyPair, tmp_path: Path) -> None:
    other = certificates.make_authority(tmp_path / "other")
    server = certificates.make_server(other, tmp_path / "server", [])
    leaf = certificates.read_certificate(server.public)
    assert leaf.issuer == certificates.read_certificate(authority.public).subject  # the same name, another key
    with pytest.raises(StorageError, match="not signed by"):
        revoke(authority, server.public)
