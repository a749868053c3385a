"""What a device has lost, and the commands that make it again."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.trust import certificates, signing
from fedcross.core.trust.admission import fingerprint
from fedcross.core.trust.keys import check_secret
from fedcross.deploy import federation, nodes
from fedcross.deploy.device import Device, new_client, rotate_key
from tests.support.command import subcommand
from tests.support.disk import largest_file

deploy = subcommand("deploy")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    authority = signing.make_authority(tmp_path / "ca").public
    return new_client(Device("porch", "fl.example.org:8443", 3, 4), authority, tmp_path / "devices")


@pytest.mark.parametrize("lost", ["pair", "folder"])
def test_a_bundle_that_has_lost_both_key_files_gets_new_ones(
    bundle: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = bundle / "keys"
    if lost == "folder":
        shutil.rmtree(keys)
    else:
        (keys / "porch-node.key").unlink()
        (keys / "porch-node.pub").unlink()
    assert deploy(["rotate-key", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "fedcross deploy nodes lists it, and fedcross deploy revoke takes its number" in said
    assert f"{keys}/porch-node.pub: register it then" in said
    assert (f"{keys}/ca.crt: missing. Copy the federation's ca.crt there." in said) == (lost == "folder")
    certificates.check_key(keys / "porch-node.key")
    check_secret(keys / "superexec.key")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert not list(keys.glob("*-old*"))
    assert rotate_key(bundle)[1].exists()


def test_what_is_no_bundle_gets_no_key(tmp_path: Path, bundle: Path) -> None:
    project = tmp_path / "porch"  # the project's folder has files of these names too
    project.mkdir()
    for name in ("docker-compose.yml", ".env", "README.md"):
        (project / name).write_text("services:\n")
    for folder in (project, bundle / "keys", tmp_path / "none"):
        with pytest.raises(StorageError, match="Name the folder that new-client made"):
            rotate_key(folder)
    assert not (project / "keys").exists()


def test_a_federations_own_device_is_led_to_the_command_that_knows_its_public_key(tmp_path: Path) -> None:
    federation.prepare(tmp_path, ["porch"])
    for name in ("porch-node.key", "porch-node.pub"):
        (tmp_path / "porch" / name).unlink()
    with pytest.raises(StorageError, match=rf"fedcross deploy federation {tmp_path} --device porch says") as error:
        rotate_key(tmp_path / "porch")
    assert "keys" not in str(error.value).replace(str(tmp_path), "")
    with pytest.raises(StorageError, match="Name the folder that new-client made"):
        rotate_key(tmp_path / "server")


@pytest.mark.parametrize("before", [None, b"", b"short"])
def test_a_secret_is_made_anew_without_a_new_key(
    bundle: Path, before: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, key = (bundle / "keys" / name for name in ("superexec.key", "porch-node.key"))
    identity = key.read_bytes()
    secret.unlink()
    if before is not None:
        secret.write_bytes(before)
        secret.chmod(0o600)
    with pytest.raises(StorageError, match="fedcross deploy rotate-key --secret BUNDLE"):
        certificates.check_key(secret)
    assert deploy(["rotate-key", "--secret", str(bundle)]) == 0
    assert capsys.readouterr().out.startswith(f"{secret} (secret)\nThe key stays.")
    assert certificates.check_key(secret).stat().st_size == 32
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert key.read_bytes() == identity


def test_a_bad_secret_does_not_survive_a_rotation_and_a_good_one_does(bundle: Path) -> None:
    secret = bundle / "keys" / "superexec.key"
    secret.write_bytes(b"")
    rotate_key(bundle)
    good = check_secret(secret).read_bytes()
    rotate_key(bundle)
    assert secret.read_bytes() == good


def test_a_folder_in_the_place_of_the_old_public_key_is_an_error_in_words(bundle: Path) -> None:
    keys = bundle / "keys"
    before = (keys / "porch-node.key").read_bytes()
    (keys / "porch-node-old.pub").mkdir()
    with pytest.raises(StorageError, match=r"porch-node-old\.pub: no plain file, .* Move it away"):
        rotate_key(bundle)
    assert (keys / "porch-node.key").read_bytes() == before


def test_a_bad_key_says_what_to_do(bundle: Path, tmp_path: Path) -> None:
    key, authority = bundle / "keys" / "porch-node.key", tmp_path / "ca"
    key.write_bytes(b"junk")
    with pytest.raises(StorageError, match="give the device a new one with fedcross deploy rotate-key"):
        certificates.check_key(key)
    (authority / "ca.key").write_bytes(b"junk")
    with pytest.raises(StorageError, match="Bring it back: without it nothing can be signed"):
        certificates.check_key(authority / "ca.key")
    for content in (b"junk", None):
        (authority / "ca.crt").unlink()
        if content is not None:
            (authority / "ca.crt").write_bytes(content)
        else:
            assert not (authority / "ca.crt").exists()
        with pytest.raises(StorageError, match=r"Bring it back: any copy of the federation's ca\.crt is as"):
            certificates.read_certificate(authority / "ca.crt")


def test_what_cannot_be_written_says_what_to_do(bundle: Path) -> None:
    secret = bundle / "keys" / "superexec.key"
    with (
        largest_file(20),
        pytest.raises(StorageError, match=r"written \(File too large\)\. Free disk space\."),
    ):
        rotate_key(bundle)
    secret.unlink()
    secret.mkdir()
    with pytest.raises(StorageError, match=r"\(Is a directory\)\. Move the folder of that name away\."):
        rotate_key(bundle)


def test_a_lost_key_beside_a_damaged_public_one_has_a_way_out(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = bundle / "keys"
    (keys / "porch-node.key").unlink()
    (keys / "porch-node.pub").write_text("gar")
    with pytest.raises(StorageError, match=r"damaged or away too\. Remove both files"):
        rotate_key(bundle)
    (keys / "porch-node.pub").unlink()
    rotate_key(bundle)
    certificates.check_key(keys / "porch-node.key")


def test_a_secret_alone_is_not_made_where_the_key_is_lost_too(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "keys" / "porch-node.key").unlink()
    (bundle / "keys" / "superexec.key").unlink()
    assert deploy(["rotate-key", "--secret", str(bundle)]) == 2
    assert "rotate-key without --secret makes both anew" in capsys.readouterr().err
    assert deploy(["rotate-key", str(bundle)]) == 0
    check_secret(bundle / "keys" / "superexec.key")


@pytest.mark.parametrize(
    "command", ["federation", "authority", "rotate-key", "server", "client", "client at the authority", "revoke"]
)
def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_is_not(
    bundle: Path, tmp_path: Path, command: str
) -> None:
    """It may be a private key, which nobody would look for."""
    folder, call = {
        "federation": (tmp_path / "f" / "server", ["federation", str(tmp_path / "f")]),
        "authority": (tmp_path / "new", ["authority", str(tmp_path / "new")]),
        "rotate-key": (bundle / "keys", ["rotate-key", str(bundle)]),
        "server": (tmp_path / "s", ["server", str(tmp_path / "ca"), str(tmp_path / "s"), "a.org"]),
        "client": (tmp_path / "d", ["client", str(tmp_path / "ca"), str(tmp_path / "d"), "porch"]),
        "client at the authority": (tmp_path / "ca", ["client", str(tmp_path / "ca"), str(tmp_path / "d"), "porch"]),
        "revoke": (tmp_path / "ca", ["revoke-certificate", str(tmp_path / "ca")]),
    }[command]
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    old, new, other = (folder / name for name in (".ca.key.k2_9abcd.part", ".ca.key.zzzzzzzz.part", ".own.part"))
    for path in (old, new, other):
        path.write_bytes(b"secret")
        path.chmod(0o600)
    for path in (old, other):
        os.utime(path, (time.time() - 3700,) * 2)
    assert deploy(call) == 0
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


@pytest.mark.parametrize("foreign", ["porch-node.pub", "porch-node.key"])
def test_another_devices_key_in_the_folder_is_not_one_to_revoke_unseen(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: str
) -> None:
    keys = bundle / "keys"
    barn = new_client(Device("barn", "h:1", 0, 1), tmp_path / "ca" / "ca.crt", bundle.parent) / "keys"
    own = {name: (folder / f"{name}-node.pub").read_bytes() for name, folder in (("porch", keys), ("barn", barn))}
    (keys / foreign).write_bytes((barn / foreign.replace("porch", "barn")).read_bytes())
    assert deploy(["rotate-key", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "porch-node.pub held another key than porch-node.key. Both are kept: " in said
    assert "revoke it" not in said
    assert "lists for this device's partition, and not the other" in said
    whose = {name: fingerprint(nodes.read_public_key(line, "x")) for name, line in own.items()}
    old, file = ("barn", "porch") if foreign.endswith(".key") else ("porch", "barn")
    assert f"porch-node-old-2.pub ({whose[old]}) is the private key's own, " in said
    assert f"porch-node-old.pub ({whose[file]}) the file's" in said
    assert deploy(["rotate-key", str(bundle)]) == 0
    assert "porch-node-old-3.pub: revoke it (or the one beside" in capsys.readouterr().out
