"""A link in the place of a public file is followed, one in the place of a key is not replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.links import followed
from fedcross.core.private_files import write_private, write_public
from fedcross.core.trust import certificates, issued, signing
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy.revocation import revoke
from tests.support.command import subcommand

deploy = subcommand("deploy")


@pytest.fixture
def authority(tmp_path: Path) -> KeyPair:
    return signing.make_authority(tmp_path / "ca")


def test_the_gateways_list_is_written_where_the_link_leads(authority: KeyPair, tmp_path: Path) -> None:
    gateway, link = tmp_path / "gateway" / "ca.crl", tmp_path / "ca" / "ca.crl"
    gateway.parent.mkdir()
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    revoke(authority, None)[0].rename(gateway)
    link.symlink_to("../gateway/ca.crl")
    before = gateway.read_bytes()
    assert deploy(["revoke-certificate", str(tmp_path / "ca"), str(porch.public)]) == 0
    assert link.is_symlink()
    assert gateway.read_bytes() != before
    assert stat.S_IMODE(gateway.stat().st_mode) == 0o644
    assert list(gateway.parent.iterdir()) == [gateway]


def test_the_record_of_an_authority_is_written_where_the_link_leads(authority: KeyPair, tmp_path: Path) -> None:
    record = tmp_path / "ca" / issued.FILE
    signing.make_client(authority, tmp_path / "d", "porch")
    record.rename(tmp_path / "record")
    record.symlink_to(tmp_path / "record")
    signing.make_client(authority, tmp_path / "d", "barn")
    assert [one.name for one in issued.kept(tmp_path / "ca")] == ["porch", "barn"]
    assert record.is_symlink()
    assert stat.S_IMODE((tmp_path / "record").stat().st_mode) == 0o600


@pytest.mark.parametrize("command", ["server", "federation"])
def test_a_servers_key_that_is_a_link_is_not_replaced(tmp_path: Path, command: str) -> None:
    root, vault = tmp_path / "keys", tmp_path / "vault"
    assert deploy(["federation", str(root)]) == 0
    vault.mkdir()
    key = root / "server" / "server.key"
    key.rename(vault / "server.key")
    key.symlink_to(vault / "server.key")
    before = [path.read_bytes() for path in (key, root / "server" / "server.crt")]
    calls = {
        "server": ["server", str(root / "authority"), str(key.parent), "a.org"],
        "federation": ["federation", str(root), "--names", "a.org"],
    }
    assert deploy(calls[command]) == 2
    assert key.is_symlink()
    assert [path.read_bytes() for path in (key, root / "server" / "server.crt")] == before
    certificates.check_key(key)  # it is read there, as in a Kubernetes pod


def test_a_clients_key_that_is_a_link_is_refused_before_anything_is_recorded(
    authority: KeyPair, tmp_path: Path
) -> None:
    porch = signing.make_client(authority, tmp_path / "d", "porch")
    porch.private.rename(tmp_path / "vault")
    porch.private.symlink_to(tmp_path / "vault")
    before = (tmp_path / "ca" / issued.FILE).read_bytes()
    with pytest.raises(StorageError, match=r"porch\.key: a link to .*vault, where the old key would stay"):
        signing.make_client(authority, tmp_path / "d", "porch")
    assert (tmp_path / "ca" / issued.FILE).read_bytes() == before


@pytest.mark.parametrize("lost", [["ca.crt", "ca.key"], ["ca.crt"], ["ca.key"]])
def test_an_authority_on_a_memory_stick_that_is_away_is_not_made_anew(tmp_path: Path, lost: list[str]) -> None:
    folder = tmp_path / "ca"
    folder.mkdir(mode=0o700)
    for name in lost:
        (folder / name).symlink_to(tmp_path / "stick" / name)
    with pytest.raises(StorageError, match=r"stick/ca\..*, which is not there\. Bring that back \(is its disk"):
        signing.make_authority(folder)
    assert all((folder / name).is_symlink() for name in lost)


def test_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root would write for the owner of a folder to any file."""
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    owner = os.geteuid() + 1
    found = Path.lstat

    def foreign(path: Path) -> os.stat_result:
        fields = list(found(path))
        fields[4] = owner
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", foreign)
    with pytest.raises(StorageError, match=rf"link: a link of user {owner}, which user \d+ does not follow"):
        write_public(tmp_path / "link", b"x")
    assert (tmp_path / "target").read_text() == "kept"


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(other)
    (tmp_path / "c").symlink_to("none/c")
    (tmp_path / "d").symlink_to("new")
    with pytest.raises(StorageError, match="a: a link that leads in a circle"):
        followed(tmp_path / "a")
    with pytest.raises(StorageError, match=r"none/c, whose folder is not there\. Is its disk mounted"):
        write_public(tmp_path / "c", b"x")
    write_public(tmp_path / "d", b"x")
    assert (tmp_path / "new").read_bytes() == b"x"
    with pytest.raises(StorageError, match="where the old key would stay"):
        write_private(tmp_path / "d", b"x")
