"""Tests of the gateway's files on a machine without containers."""

import pytest

from fedcross.core.errors import StorageError
from fedcross.deploy import gateway
from fedcross.deploy.federation import prepare


@pytest.fixture
def keys(tmp_path):
    prepare(tmp_path / "keys", [])
    return tmp_path / "keys" / "server"


@pytest.fixture
def haproxy(monkeypatch):
    monkeypatch.setattr(gateway, "_haproxy", lambda: "/usr/sbin/haproxy")


def test_its_files_name_places_of_this_machine_only(keys, tmp_path, haproxy):
    work = tmp_path / "gateway"
    command = gateway.prepare(keys, work, "127.0.0.1:8000", "192.0.2.7:8443")
    config = (work / "gateway.cfg").read_text()
    assert command[0] == "/usr/sbin/haproxy"
    assert command[-1] == str(work / "gateway.cfg")
    assert "bind 192.0.2.7:8443 ssl crt " + str(work / "server.pem") in config
    assert config.count("server superlink 127.0.0.1:8000 ") == 3
    assert config.count(f"ca-file {keys / 'ca.crt'} verifyhost superlink sni str(superlink)") == 3
    # Nothing of the container is left: not its folders, not the resolver, which would ask a DNS server for an address.
    assert not [
        place for place in ("/etc/fedcross", "/tmp/gateway.sock", "resolvers docker init-addr") if place in config
    ]
    assert f'SOCKET = "{work / "gateway.sock"}"' in (work / "deadline.lua").read_text()


def test_what_it_keeps_is_private(keys, tmp_path, haproxy):
    work = tmp_path / "gateway"
    gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:8443")
    assert work.stat().st_mode & 0o777 == 0o700
    pair = work / "server.pem"
    assert pair.stat().st_mode & 0o777 == 0o600
    assert pair.read_bytes() == (keys / "server.crt").read_bytes() + (keys / "server.key").read_bytes()


def test_a_renewed_certificate_is_taken_up_at_the_next_start(keys, tmp_path, haproxy):
    for _ in range(2):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
        (keys / "server.crt").write_bytes((keys / "server.crt").read_bytes() + b"\n")
    assert not (tmp_path / "gateway" / "server.pem").read_bytes().startswith((keys / "server.crt").read_bytes())
    gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    assert (tmp_path / "gateway" / "server.pem").read_bytes().startswith((keys / "server.crt").read_bytes())


def test_paths_with_spaces_are_refused_before_haproxy_misreads_them(keys, tmp_path, haproxy):
    with pytest.raises(StorageError, match="no spaces"):
        gateway.prepare(keys, tmp_path / "my gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_without_haproxy_the_message_names_the_package(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(gateway.shutil, "which", lambda *_, **__: None)
    with pytest.raises(StorageError, match="Debian's package haproxy"):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_what_is_replaced_is_in_the_file(tmp_path):
    with pytest.raises(StorageError, match="does not name elsewhere"):
        gateway._changed(gateway.CONFIG, {"elsewhere": "here"})
