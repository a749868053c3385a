"""What is said of keys that others can use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.exposed import check_owner
from fedcross.core.private_files import check_folder, check_private
from fedcross.deploy import federation
from fedcross.server.commands import device_checks, key_checks
from tests.support.command import subcommand

deploy = subcommand("deploy")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("authority/ca.key", "make a new authority and hand its ca.crt to all devices"),
        ("server/server.key", "make a new authority and hand its ca.crt to all devices (after a new pair, the old one"),
        ("porch/porch-node.key", "give the device a new key (fedcross deploy rotate-key) and revoke the old one"),
        ("superexec/superexec.key", "remove it: fedcross deploy federation makes a new one"),
        ("operator/token", "remove it: fedcross deploy federation makes a new one"),
    ],
)
def test_an_open_key_is_closed_first_and_what_follows_fits_its_kind(tmp_path: Path, name: str, says: str) -> None:
    federation.prepare(tmp_path, ["porch"])
    path = tmp_path / name
    path.chmod(0o644)
    with pytest.raises(StorageError) as error:
        check_private(path)
    first, then = str(error.value).split("\n")
    assert first.endswith(f"so others on this machine can use it. Close it first: chmod 600 {path}")
    assert then.startswith(f"If it may have been read, {says}")
    path.chmod(0o600)
    path.parent.chmod(0o755)
    with pytest.raises(StorageError) as error:
        check_folder(path.parent)
    first, then = str(error.value).split("\n")
    assert first.endswith(f"Close it first: chmod 700 {path.parent}")
    assert f"{path.name}: {says}" in then


def test_a_command_in_a_message_can_be_given_to_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my keys"
    federation.prepare(folder, [])
    (folder / "server").chmod(0o755)
    with pytest.raises(StorageError, match=rf"chmod 700 '{folder}/server'"):
        check_folder(folder / "server")
    (folder / "server").chmod(0o700)
    (folder / "server" / "ca.crt").unlink()
    [told] = [one.text for one in key_checks.check_keys(folder / "server", None) if one.kind == "FAULT"]
    assert f"fedcross deploy federation '{folder}' copies it there" in told


@pytest.mark.parametrize(
    ("owner", "user", "says"),
    [
        (
            0,
            0,
            "user 0 owns it, so user 12345, who owns its folder, cannot read it. Give it to the owner of its folder:",
        ),
        (0, 12345, "user 0 owns it, so user 12345, who owns its folder, cannot read it. Give it to the owner of its"),
        (777, 0, "user 777 owns it, and can read it, though user 12345 owns its folder. Give it to the owner of its"),
        (777, 777, None),
        (12345, 0, None),
    ],
)
def test_a_key_belongs_to_the_owner_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, user: int, says: str | None
) -> None:
    federation.prepare(tmp_path, ["porch"])
    key, found = tmp_path / "porch" / "porch-node.key", Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        fields = list(found(path, **options))
        fields[4:6] = [owner if path.name == key.name else 12345, 12345]
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if says is None:
        assert check_owner(key) == key
        return
    with pytest.raises(StorageError) as error:
        check_owner(key)
    assert str(error.value).startswith(f"{key}: {says}")
    assert f"chown 12345:12345 {key}" in str(error.value)
    for told in (key_checks.check_keys(key.parent, None), device_checks.check_node_key(key.parent)):
        assert [one.text for one in told if one.kind == "FAULT"] == [str(error.value)]
    assert deploy(["check", str(tmp_path / "public" / "ca.crt"), str(key)]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(StorageError, match=r"may not read it\. Give it to the owner of its folder: chown 12345"):
            check_private(key)


def test_doctor_and_server_tell_of_a_place_where_others_can_put_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "keys"
    federation.prepare(root, [])
    root.chmod(0o777)
    for call in (
        ["server", str(root / "authority"), str(root / "server"), "a.org"],
        ["client", str(root / "authority"), str(root / "d"), "porch"],
        ["authority", str(root / "new")],
    ):
        assert deploy(call) == 2
        assert f"others on this machine can put keys of theirs there: chmod o-w {root}" in capsys.readouterr().err
    [told] = [one.text for one in key_checks.check_keys(root / "server", None) if one.kind == "FAULT"]
    assert told.endswith(f"chmod o-w {root}")


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Paths and who owns them; anything else is the user's, 10001, who asks."""
    told: dict[Path, int] = {}
    found = Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        fields = list(found(path, **options))
        fields[4:6] = [told.get(path, 10001)] * 2
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return told


@pytest.mark.parametrize(
    ("above", "owner", "told"), [(10001, 777, True), (0, 10001, False), (10001, 10001, False), (0, 0, False)]
)
def test_a_folder_of_keys_belongs_to_the_owner_of_its_federation(
    tmp_path: Path, owners: dict[Path, int], above: int, owner: int, told: bool
) -> None:
    federation.prepare(tmp_path, [])
    owners |= {tmp_path: above, tmp_path / "server": owner}
    owners |= dict.fromkeys((tmp_path / "server").iterdir(), owner)
    notes = [one.text for one in key_checks.check_keys(tmp_path / "server", None) if one.kind != "ok"]
    assert len(notes) == told
    says = f"{tmp_path / 'server'}: user 777 owns this folder of keys, and can read them, though user 10001 owns"
    assert not told or notes[0].startswith(says)


@pytest.mark.parametrize(("vault", "told"), [(777, True), (10001, False), (0, False)])
def test_a_key_that_a_link_leads_to_belongs_to_the_owner_of_the_links_folder(
    tmp_path: Path, owners: dict[Path, int], vault: int, told: bool
) -> None:
    root, place = tmp_path / "keys", tmp_path / "vault"
    federation.prepare(root, [])
    place.mkdir(mode=0o700)
    key = root / "server" / "server.key"
    key.rename(place / "server.key")
    key.symlink_to(place / "server.key")
    owners |= {place: vault, place / "server.key": vault}
    faults = [one.text for one in key_checks.check_keys(root / "server", None) if one.kind == "FAULT"]
    assert len(faults) == told
    assert not told or f"{key}: a link to {place}/server.key, which user 777 owns, and can read" in faults[0]
