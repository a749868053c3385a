from __future__ import annotations

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.trust import certificates, keys, signing
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy import federation
from fedcross.deploy.device import rotate_key
from fedcross.engines.executor import operators
from fedcross.server.commands import key_checks
from tests.support.command import subcommand
from tests.support.disk import largest_file

deploy = subcommand("deploy")
DEVICES = ["client-1", "client-2"]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def server_pair(root: Path) -> list[str]:
    return [str(root / "server" / name) for name in ("server.crt", "server.key")]


def test_everything_is_made_once_and_stays(tmp_path: Path) -> None:
    federation.prepare(tmp_path, DEVICES, ["fl.example.org"])
    before = contents(tmp_path)
    assert federation.prepare(tmp_path, DEVICES, ["fl.example.org"]) == []
    assert contents(tmp_path) == before
    assert {name for name in before if name.endswith(".key")} == {
        "authority/ca.key", "server/server.key", "superexec/superexec.key",
        "client-1/client-1-node.key", "client-2/client-2-node.key", "client-1/superexec.key", "client-2/superexec.key",
    }  # fmt: skip
    assert {name for name in before if "token" in name} == {"server/gateway.token", "page/token", "operator/token"}
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700
        elif path.suffix in {".key", ".token"} or path.name == "token":
            assert mode == 0o600


def test_devices_trust_the_authority_and_no_device_has_anothers_key(tmp_path: Path) -> None:
    federation.prepare(tmp_path, DEVICES)
    authority = (tmp_path / "authority" / "ca.crt").read_bytes()
    for device in DEVICES:
        folder = tmp_path / device
        own = {f"{device}-node.key", f"{device}-node.pub", "superexec.key"}
        assert {path.name for path in folder.iterdir()} == {"ca.crt", *own}
        assert (folder / "ca.crt").read_bytes() == authority
        public = tmp_path / "public" / f"{device}-node.pub"
        assert public.read_bytes() == (folder / public.name).read_bytes()
    assert not list((tmp_path / "public").glob("*.key"))


def test_server_certificate_has_all_names(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [], ["fl.example.org", "192.0.2.7"])
    names = certificates.server_names(tmp_path / "server" / "server.crt")
    assert names == {"superlink", "gateway", "fl.example.org", "192.0.2.7", "localhost", "127.0.0.1"}


def test_server_certificate_is_renewed_when_it_runs_out_or_lacks_a_name(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    path = tmp_path / "server" / "server.crt"

    def serial() -> int:
        return certificates.read_certificate(path).serial_number

    first = serial()
    signing.make_server(authority, tmp_path / "server", federation.INNER_NAMES, days=29)
    assert federation.prepare(tmp_path, []) == server_pair(tmp_path)
    second = serial()
    assert federation.prepare(tmp_path, [], ["fl.example.org"]) == server_pair(tmp_path)
    assert len({first, second, serial()}) == 3


def test_the_operators_token_is_one_that_the_superlink_takes(tmp_path: Path) -> None:
    federation.prepare(tmp_path, DEVICES)
    file = tmp_path / "operator" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert operators.token({operators.VARIABLE: str(file)}) == file.read_text().strip()
    assert file.read_bytes() != (tmp_path / "page" / "token").read_bytes()
    assert not [path for device in DEVICES for path in (tmp_path / device).iterdir() if "token" in path.name]


def test_without_the_authoritys_key_a_good_certificate_is_kept_and_a_bad_one_is_an_error(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    (tmp_path / "authority" / "ca.key").unlink()
    assert federation.prepare(tmp_path, []) == []
    with pytest.raises(StorageError, match="no such key file"):
        federation.prepare(tmp_path, [], ["fl.example.org"])


@pytest.mark.parametrize("name", ["../../evil", "a/b", ".", ""])
def test_a_device_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="use a to z"):
        federation.prepare(tmp_path / "a" / "b" / "c", ["porch", name])
    assert not any(tmp_path.iterdir())


def test_a_disk_that_was_full_is_not_in_the_way(tmp_path: Path) -> None:
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        federation.prepare(tmp_path, DEVICES)
    federation.prepare(tmp_path, DEVICES)
    assert federation.prepare(tmp_path, DEVICES) == []


def test_a_server_key_of_another_certificate_is_replaced(tmp_path: Path) -> None:
    federation.prepare(tmp_path / "a", [])
    federation.prepare(tmp_path / "b", [])
    (tmp_path / "a" / "server" / "server.key").write_bytes((tmp_path / "b" / "server" / "server.key").read_bytes())
    assert federation.prepare(tmp_path / "a", []) == server_pair(tmp_path / "a")
    certificates.check_key(tmp_path / "a" / "server" / "server.key")


def test_a_missing_authority_is_not_replaced(tmp_path: Path) -> None:
    """Its folder is on another machine; a new authority would lock out every device."""
    federation.prepare(tmp_path, ["porch"], ["fl.example.org"])
    (tmp_path / "authority").rename(tmp_path.with_name("elsewhere"))
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=r"authority/ca\.crt: missing, though .*/operator/ca\.crt is a copy of it"):
        federation.prepare(tmp_path, [])
    assert contents(tmp_path) == before
    assert not (tmp_path / "authority").exists()
    for name in ("server", "superexec", "public", "page", "operator"):
        (tmp_path / name / "ca.crt").unlink()
    for devices in (["porch"], []):
        with pytest.raises(StorageError, match=r"porch/ca\.crt is a copy of it"):
            federation.prepare(tmp_path, devices)
    signing.make_authority(tmp_path / "authority")  # on purpose
    (tmp_path / "porch" / "ca.crt").unlink()
    copies = [str(tmp_path / name / "ca.crt") for name in (*federation.OWN[1:], "porch")]
    assert federation.prepare(tmp_path, ["porch"]) == [*server_pair(tmp_path), *copies]
    assert "fl.example.org" in certificates.server_names(tmp_path / "server" / "server.crt")


def test_a_new_server_certificate_keeps_the_names_of_the_old_one(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [], ["fl.example.org"])
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    pair = KeyPair(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    own = {"superlink", "gateway", "fl.example.org", "localhost", "127.0.0.1"}
    signing.make_server(authority, pair.public.parent, [*federation.INNER_NAMES, "fl.example.org", "::1"], days=10)
    assert federation.prepare(tmp_path, []) == server_pair(tmp_path)
    assert certificates.server_names(pair.public) == {*own, "::1"}
    assert federation.prepare(tmp_path, [], ["b.org"]) == server_pair(tmp_path)
    assert certificates.server_names(pair.public) == {*own, "::1", "b.org"}
    pair.private.unlink()
    assert federation.prepare(tmp_path, []) == server_pair(tmp_path)
    assert certificates.server_names(pair.public) == {*own, "::1", "b.org"}


@pytest.mark.parametrize("damage", [b"junk", None])
def test_names_that_are_lost_must_be_given(tmp_path: Path, damage: bytes | None) -> None:
    federation.prepare(tmp_path, [], ["fl.example.org"])
    path = tmp_path / "server" / "server.crt"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(StorageError, match=r"the names in it are lost: bring it back, or give all with --names"):
        federation.prepare(tmp_path, [])
    assert federation.prepare(tmp_path, [], ["fl.example.org"]) == server_pair(tmp_path)
    assert "fl.example.org" in certificates.server_names(path)


@pytest.mark.parametrize("closed", ["server.key", "server.crt"])
def test_a_server_key_that_this_user_may_not_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    federation.prepare(tmp_path, [])
    path = tmp_path / "server" / closed
    before, read = contents(tmp_path), Path.read_bytes

    def refused(file: Path) -> bytes:
        if file == path:
            raise PermissionError(13, "Permission denied", str(file))
        return read(file)

    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda file, _: file != path)
        patch.setattr(Path, "read_bytes", refused)
        with pytest.raises(StorageError, match=f"{closed}: Permission denied"):
            federation.prepare(tmp_path, [], ["b.org"])
    assert contents(tmp_path) == before


def test_an_authority_that_ends_soon_is_told_of_and_signs_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signing.make_authority(tmp_path / "authority", days=20)
    assert federation.prepare(tmp_path, [])
    assert federation.prepare(tmp_path, []) == []
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith(f"{tmp_path / 'authority' / 'ca.crt'}: 19 days left, and no certificate lives longer.")
    federation.prepare(tmp_path / "new", [])
    assert capsys.readouterr().err == ""


def test_a_name_that_is_none_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither an IP address nor a host name"):
        federation.prepare(tmp_path / "keys", [], ["a;id"])
    assert not (tmp_path / "keys").exists()


def test_a_folder_in_which_others_may_rename_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StorageError, match=r"mode 777, so others .*chmod o-w"):
        federation.prepare(tmp_path / "open", [])
    assert not any((tmp_path / "open").iterdir())
    (tmp_path / "open").chmod(0o1777)
    assert federation.prepare(tmp_path / "open", [])


def test_the_copies_have_the_certificate_alone(tmp_path: Path) -> None:
    pair = signing.make_authority(tmp_path / "authority")
    alone = pair.public.read_bytes()
    pair.public.write_bytes(alone + pair.private.read_bytes())
    federation.prepare(tmp_path, [])
    assert (tmp_path / "public" / "ca.crt").read_bytes() == alone


def test_a_device_without_its_public_key_gets_it_and_a_foreign_one_is_told(tmp_path: Path) -> None:
    federation.prepare(tmp_path, DEVICES)
    one, other = (tmp_path / name / f"{name}-node.pub" for name in DEVICES)
    before = one.read_bytes()
    one.unlink()
    assert federation.prepare(tmp_path, DEVICES) == [str(one)]
    assert one.read_bytes() == before
    one.write_bytes(other.read_bytes())
    with pytest.raises(StorageError, match="this is not the key of"):
        federation.prepare(tmp_path, DEVICES)


def test_the_key_of_a_device_that_is_lost_is_not_replaced_in_silence(tmp_path: Path) -> None:
    federation.prepare(tmp_path, ["porch"])
    folder, public = tmp_path / "porch", tmp_path / "public" / "porch-node.pub"
    registered = public.read_bytes()
    (folder / "porch-node.key").unlink()
    with pytest.raises(
        StorageError, match=r"porch-node\.pub: its private key porch-node\.key is away.*rotate-key .*porch "
    ):
        federation.prepare(tmp_path, ["porch"])
    assert rotate_key(folder)[1].read_bytes() == registered
    assert federation.prepare(tmp_path, ["porch"]) == [str(public)]
    assert public.read_bytes() == (folder / "porch-node.pub").read_bytes() != registered
    folder.rename(tmp_path / "on-the-device")
    before = public.read_bytes()
    with pytest.raises(StorageError, match=r"public/porch-node\.pub: this device had a key"):
        federation.prepare(tmp_path, ["porch"])
    assert public.read_bytes() == before


def test_what_was_made_before_an_error_is_named(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    (tmp_path / "server" / "server.key").unlink()
    (tmp_path / "superexec" / "superexec.key").write_bytes(b"short")
    with pytest.raises(
        StorageError, match=r"5 bytes, a secret has 16 or more[^\n]*\nMade before that:\n.*server\.crt\n.*server\.key$"
    ):
        federation.prepare(tmp_path, [])


@pytest.mark.parametrize("name", ["server/gateway.token", "operator/token", "page/token"])
def test_an_empty_token_is_none(tmp_path: Path, name: str) -> None:
    federation.prepare(tmp_path, [])
    path = tmp_path / name
    path.write_bytes(b"\n")
    with pytest.raises(StorageError, match="no token, it is one line of") as error:
        federation.prepare(tmp_path, [])
    assert ("fedcross deploy server" in str(error.value)) == (name == "server/gateway.token")  # which makes no other
    [said] = [one for one in key_checks.check_keys(path.parent, None) if str(path) in one.text]
    assert said.kind == "FAULT"
    path.unlink()
    assert federation.prepare(tmp_path, []) == [str(path)]
    assert all(one.kind != "FAULT" for one in key_checks.check_keys(path.parent, None))


def slow_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pair take its time between the look whether it is there and its writing."""
    save = keys.save

    def slowly(*given: Any) -> None:
        time.sleep(0.1)
        save(*given)

    monkeypatch.setattr(keys, "save", slowly)


def test_federations_at_once_make_one_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_saving(monkeypatch)
    root = tmp_path / "keys"
    with ThreadPoolExecutor(3) as pool:
        done = sorted(pool.map(lambda _: federation.prepare(root, ["porch"]), range(3)), key=len)
    assert done[:2] == [[], []]
    assert str(root / "authority" / "ca.crt") in done[2]
    certificates.check_key(root / "authority" / "ca.key")
    certificates.check_key(root / "porch" / "porch-node.key")
    certificates.check_certificate(root / "server" / "server.crt", root / "authority" / "ca.crt")
    assert len({path.read_bytes() for path in root.glob("*/ca.crt")}) == 1


def test_federations_that_share_the_authoritys_folder_alone_wait_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers each has a root of its own, and the folders below are volumes."""
    slow_saving(monkeypatch)
    (tmp_path / "volumes").mkdir()
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
        for name in federation.OWN:
            (tmp_path / "volumes" / name).mkdir(mode=0o700, exist_ok=True)
            (root / name).symlink_to(tmp_path / "volumes" / name)
    with ThreadPoolExecutor(2) as pool:
        done = sorted(pool.map(lambda root: federation.prepare(root, []), roots), key=len)
    assert done[0] == []
    certificates.check_key(tmp_path / "volumes" / "authority" / "ca.key")


def test_a_federation_with_nothing_to_do_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be one that cannot be written."""
    federation.prepare(tmp_path, DEVICES)

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("fedcross.core.replacing.tempfile.mkstemp", refused)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert federation.prepare(tmp_path, DEVICES) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
