"""Certificates against OpenSSL as Python has it, and node keys against Flower."""

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedcross.core.errors import StorageError
from fedcross.engines.certificates import make_authority, make_node_key, make_server, read_certificate, read_key


def served(pair, context):
    """Return the TLS version of a connection of `context` to a server with `pair`."""
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted.load_cert_chain(pair.public, pair.private)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            connection, _ = listening.accept()
            try:
                trusted.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            plain = socket.create_connection(listening.getsockname())
            with context.wrap_socket(plain, server_hostname="fl.example.org") as secure:
                return secure.version()
        finally:
            thread.join()


def test_a_device_trusts_the_server_of_its_authority_and_no_other(tmp_path):
    authority = make_authority(tmp_path / "ca")
    pair = make_server(authority, tmp_path / "server", ["fl.example.org", "192.0.2.7"])
    assert served(pair, ssl.create_default_context(cafile=str(authority.public))).startswith("TLSv1")
    certificate, now = read_certificate(pair.public), datetime.now(UTC)
    assert timedelta(days=364) < certificate.not_valid_after_utc - now <= timedelta(days=365)
    assert certificate.not_valid_before_utc < now - timedelta(minutes=55)  # a device's clock may be behind
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]
    other = make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        served(pair, ssl.create_default_context(cafile=str(other.public)))
    wrong = make_server(authority, tmp_path / "wrong", ["elsewhere.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        served(wrong, ssl.create_default_context(cafile=str(authority.public)))


def test_private_files_are_the_owners_and_a_certificate_ends_with_its_authority(tmp_path):
    authority = make_authority(tmp_path / "ca", days=30)
    server = make_server(authority, tmp_path / "server", ["localhost"])
    node = make_node_key(tmp_path / "node", "porch", "porch partition-3")
    assert {path.stat().st_mode & 0o777 for path in (authority.private, server.private, node.private)} == {0o600}
    assert read_certificate(server.public).not_valid_after_utc < datetime.now(UTC) + timedelta(days=30)
    assert load_ssh_public_key(node.public.read_bytes()) == read_key(node.private).public_key()
    assert load_ssh_private_key(node.private.read_bytes(), None).curve.name == "secp256r1"  # as Flower reads it
    assert node.public.read_text().endswith(" porch partition-3\n")


def test_an_authority_that_has_run_out_signs_nothing(tmp_path):
    authority = make_authority(tmp_path / "ca", days=0)
    with pytest.raises(StorageError, match="expired"):
        make_server(authority, tmp_path / "server", ["localhost"])


@pytest.mark.parametrize("read", [read_certificate, read_key])
def test_a_damaged_file_is_named(tmp_path, read):
    (tmp_path / "file").write_text("no PEM")
    with pytest.raises(StorageError, match="file: no readable"):
        read(tmp_path / "file")
