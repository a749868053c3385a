"""The folder of a federation's keys: complete, kept, renewed in time."""

from datetime import timedelta

import pytest

from fedcross.core.errors import ConfigError
from fedcross.deploy import keys
from fedcross.deploy.control import read_public_key
from fedcross.engines.certificates import KeyPair, make_server


@pytest.fixture
def folder(tmp_path):
    keys.init(tmp_path / "keys", ["client-1", "client-2"], ["fl.example.org"])
    return tmp_path / "keys"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_init_changes_nothing_and_makes_what_was_lost(folder):
    before = contents(folder)
    assert keys.init(folder, ["client-1", "client-2"]) == []
    assert contents(folder) == before
    (folder / "server" / keys.PAGE).unlink()
    assert keys.init(folder, ["client-1", "client-2"]) == [folder / "server" / keys.PAGE]


def test_each_device_has_a_key_of_its_own_for_its_partition(folder):
    found = [read_public_key(folder / "server" / f"client-{i}-node.pub") for i in (1, 2)]
    assert [partition for _, partition in found] == [0, 1]
    assert len({key for key, _ in found}) == 2
    assert len({(folder / f"client-{i}" / keys.SECRET).read_bytes() for i in (1, 2)}) == 2


def test_only_the_owner_reads_the_secrets(folder):
    secret = {path for path in folder.rglob("*") if path.suffix in (".key", ".token")}
    assert len(secret) == 9
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}


@pytest.mark.parametrize(("days", "renewed"), [(15, False), (13, True), (0, True)])
def test_a_certificate_is_renewed_from_14_days_on(folder, days, renewed):
    authority = KeyPair(folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    certificate = make_server(authority, folder / "server", [*keys.INNER_NAMES, "fl.example.org"], days).public
    assert bool(keys.expires_soon(certificate)) == renewed
    assert (certificate in keys.init(folder)) == renewed
    assert "fl.example.org" in keys.names_in(certificate)
    assert keys.time_left(certificate) > timedelta(days=12)


def test_a_new_name_makes_a_new_certificate_that_keeps_the_others(folder):
    keys.init(folder, names=["192.0.2.7"])
    assert {"gateway", "fl.example.org", "192.0.2.7"} <= set(keys.names_in(folder / "server" / "server.crt"))


@pytest.mark.parametrize("name", ["", "server", "Porch", "a/b", "-a", "a" * 33])
def test_a_name_that_can_be_no_devices_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="device"):
        keys.init(tmp_path, [name])
