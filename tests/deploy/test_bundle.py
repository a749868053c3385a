"""Whose keys a bundle has when its folder has another name, and what rotate-key and doctor say of it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.trust import certificates, signing
from fedcross.core.trust.keys import lost_key, make_node_key
from fedcross.deploy import federation
from fedcross.deploy.bundle import started_as
from fedcross.deploy.device import Device, new_client, new_secret, rotate_key
from fedcross.server.commands import device_checks
from tests.support.command import subcommand

deploy = subcommand("deploy")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The bundle of the device porch, in a folder that was renamed."""
    authority = signing.make_authority(tmp_path / "ca").public
    made = new_client(Device("porch", "fl.example.org:8443", 3, 4), authority, tmp_path / "devices")
    return made.rename(made.with_name("porch-2026"))


def faults(folder: Path) -> list[str]:
    return [one.text for one in device_checks.check_node_key(folder) if one.kind == "FAULT"]


@pytest.mark.parametrize("files", ["all", "compose", "unit", "none"])
@pytest.mark.parametrize("place", ["renamed", "link"])
def test_a_bundle_keeps_its_name_whatever_its_folder_is_called(
    bundle: Path, tmp_path: Path, files: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if files in ("unit", "none"):
        (bundle / "docker-compose.yml").unlink()
    if files in ("compose", "none"):
        (bundle / "fedcross-porch.service").unlink()
    named = bundle
    if place == "link":
        named = tmp_path / "device"
        named.symlink_to(bundle)
    before = (bundle / "keys" / "porch-node.pub").read_bytes()
    assert deploy(["rotate-key", str(named)]) == 0
    said = capsys.readouterr().out
    assert f"{bundle}/keys/porch-node-old.pub: revoke it" in said
    assert "lost" not in said
    assert (bundle / "keys" / "porch-node-old.pub").read_bytes() == before
    assert {path.name for path in (bundle / "keys").glob("*-node.*")} == {"porch-node.key", "porch-node.pub"}
    certificates.check_key(bundle / "keys" / "porch-node.key")


def test_a_first_key_has_the_name_that_the_bundle_starts(bundle: Path) -> None:
    for path in (bundle / "keys").glob("porch-node.*"):
        path.unlink()
    assert rotate_key(bundle).new == bundle / "keys" / "porch-node.pub"


def test_a_secret_alone_is_made_in_a_renamed_bundle(bundle: Path) -> None:
    key = (bundle / "keys" / "porch-node.key").read_bytes()
    (bundle / "keys" / "superexec.key").unlink()
    assert new_secret(bundle).stat().st_size == 32
    assert (bundle / "keys" / "porch-node.key").read_bytes() == key


def test_no_first_key_beside_what_may_be_the_earlier_one(bundle: Path) -> None:
    key = bundle / "keys" / "porch-node.key"
    key.rename(key.with_suffix(".key.bak"))
    key.with_suffix(".pub").unlink()
    with pytest.raises(StorageError, match=r"porch-node\.key\.bak: perhaps the device's key"):
        rotate_key(bundle)
    assert not key.exists()


def test_keys_of_another_name_than_the_bundle_starts_are_given_it(bundle: Path) -> None:
    keys = bundle / "keys"
    for ending in ("key", "pub"):
        (keys / f"porch-node.{ending}").rename(keys / f"porch-2026-node.{ending}")
    with pytest.raises(StorageError, match="keys of porch-2026, but the bundle starts the device as porch") as error:
        rotate_key(bundle)
    words = shlex.split(str(error.value).split("their name: ")[1].split("\n")[0])
    assert words.count("mv") == 2
    subprocess.run(shlex.join(words).replace("'&&'", "&&"), shell=True, check=True)
    assert rotate_key(bundle).old == keys / "porch-node-old.pub"


def test_of_two_devices_keys_the_bundle_names_its_own(bundle: Path) -> None:
    keys = bundle / "keys"
    make_node_key(keys, "porch-2026")  # as an earlier rotate-key made it
    [told] = faults(keys)
    others = f"{keys}/porch-2026-node.key"
    assert told == f"{keys}: 2 files *-node.key, a device has one. The bundle starts it with porch-node.key. " + (
        f"Move the others away: {others}"
    )
    assert rotate_key(bundle).new == keys / "porch-node.pub"
    for path in (bundle / "docker-compose.yml", bundle / "fedcross-porch.service"):
        path.unlink()
    [told] = faults(keys)
    assert "that the option --name of its command or unit names" in told
    assert rotate_key(bundle).new == keys / "porch-2026-node.pub"  # the folder's name
    moved = bundle.rename(bundle.with_name("new"))
    with pytest.raises(StorageError, match=r"keys of porch and porch-2026, and a device has one\. Move the others'"):
        rotate_key(moved)


def test_a_lost_key_of_a_renamed_bundle_is_rotated(bundle: Path) -> None:
    keys = bundle / "keys"
    (keys / "porch-node.key").unlink()
    assert f"fedcross deploy rotate-key {bundle} makes a new one" in lost_key(keys / "porch-node.pub")
    assert rotate_key(bundle).old.exists()


def test_a_federations_device_and_what_tells_no_name(tmp_path: Path) -> None:
    federation.prepare(tmp_path, ["porch"])
    assert rotate_key(tmp_path / "porch").new == tmp_path / "porch" / "porch-node.pub"
    assert started_as(tmp_path) is None
    (tmp_path / "docker-compose.yml").write_text("# --name=attic\ncommand: --name=a\ncommand: --name=b\n")
    assert started_as(tmp_path) is None
    (tmp_path / "docker-compose.yml").write_text("# --name=attic\n  - --container-name=x\n  - --name=barn\n")
    assert started_as(tmp_path) == "barn"


def test_half_a_bundle_is_made_again(bundle: Path) -> None:
    """new-client was killed before it had made the key."""
    for path in [*bundle.iterdir(), *(bundle / "keys").iterdir()]:
        if path.is_file():
            path.unlink()
    told = faults(bundle / "keys")
    assert f"remove {bundle} and call fedcross deploy new-client again, which was cut off there." in told[0]
    assert "rotate-key" not in told[0]
    with pytest.raises(StorageError, match="If new-client was cut off, remove what it has left and call it again"):
        rotate_key(bundle)
