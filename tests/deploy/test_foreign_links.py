"""What a device's user puts in the place of files and folders before root makes that device a new key."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcross.core import links, plain_files
from fedcross.core.errors import StorageError
from fedcross.core.links import resolved
from fedcross.core.trust import signing
from fedcross.deploy import device, federation
from fedcross.deploy.device import Device, new_client, new_secret, rotate_key
from tests.support.command import subcommand

deploy = subcommand("deploy")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
THIEF, HONEST = 10002, 10003


@pytest.fixture
def bundles(tmp_path: Path) -> tuple[Path, Path]:
    """The bundles of a thief and of an honest device, on one machine."""
    authority = signing.make_authority(tmp_path / "ca").public
    places = [tmp_path / "one", tmp_path / "other"]
    a, honest = (new_client(Device(n, "h:1", 0, 2), authority, p) for n, p in zip(("a", "honest"), places))
    return a, honest


def owned(user: int, *paths: Path) -> None:
    for path in paths:
        for one in (path, *path.rglob("*")):
            os.chown(one, user, user, follow_symlinks=False)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_uid) for path in folder.iterdir()}


@needs_root
@pytest.mark.parametrize("place", ["keys", "bundle", "above"])
@pytest.mark.parametrize("named", ["honest", "a"])
def test_root_follows_no_link_of_a_devices_user_in_place_of_a_folder(
    bundles: tuple[Path, Path], tmp_path: Path, place: str, named: str
) -> None:
    a, honest = bundles
    if place == "keys":
        shutil.rmtree(a / "keys")
        (a / "keys").symlink_to(honest / "keys")
        (a / "docker-compose.yml").write_text(f"command: --name={named}\n")
        (a / "fedcross-a.service").unlink()
    elif place == "bundle":
        a.rename(tmp_path / "x")
        a.symlink_to(honest)
    else:
        a.parent.rename(tmp_path / "x")
        a.parent.symlink_to(honest.parent)
        a = a.parent / "honest"
    owned(THIEF, tmp_path / "one", *([a] if place == "bundle" else []))
    owned(HONEST, honest)
    before = contents(honest / "keys")
    for call in (rotate_key, new_secret):
        with pytest.raises(StorageError, match=rf": a link of user {THIEF}, which user 0 does not follow"):
            call(a)
    assert deploy(["rotate-key", str(a)]) == 2
    assert contents(honest / "keys") == before


@needs_root
def test_root_writes_no_keys_into_a_folder_of_another_user_than_the_bundles(bundles: tuple[Path, Path]) -> None:
    """A link of root's that lay in the bundle can be moved by its user."""
    a, honest = bundles
    shutil.rmtree(a / "keys")
    owned(THIEF, a)
    owned(HONEST, honest)
    (a / "keys").symlink_to(honest / "keys")
    before = contents(honest / "keys")
    with pytest.raises(StorageError, match=rf"keys: user {HONEST} owns it, and user {THIEF} the bundle {a}, who could"):
        rotate_key(a)
    assert contents(honest / "keys") == before


@needs_root
def test_keys_alone_may_be_the_services(bundles: tuple[Path, Path]) -> None:
    a, _ = bundles
    owned(THIEF, a / "keys")
    rotate_key(a)
    assert {path.stat().st_uid for path in (a / "keys").glob("*-node*")} == {THIEF}


def test_links_of_root_and_of_ones_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "l").symlink_to("b/../b")
    (tmp_path / "m").symlink_to(tmp_path / "l")
    assert resolved(tmp_path / "m" / "c" / "..") == (tmp_path / "b").resolve()
    (tmp_path / "o").symlink_to("o")
    with pytest.raises(StorageError, match="a link that leads in a circle"):
        resolved(tmp_path / "o" / "x")


@needs_root
def test_root_gives_away_what_it_has_written_and_no_file_with_a_second_name(
    bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where the kernel lets users link files of others (fs.protected_hardlinks=0)."""
    a, _ = bundles
    owned(THIEF, a)
    (tmp_path / "shadow").write_text("root's secret, long enough")
    secret = a / "keys" / "superexec.key"
    secret.unlink()
    secret.hardlink_to(tmp_path / "shadow")
    rotate_key(a)
    assert (tmp_path / "shadow").stat().st_uid == 0


@pytest.mark.parametrize("name", ["keys/a-node-old.pub", "keys/a-node.key", "docker-compose.yml"])
@pytest.mark.parametrize("kind", ["pipe", "zero", "large"])
def test_root_reads_plain_and_small_files_only(bundles: tuple[Path, Path], name: str, kind: str) -> None:
    """It waited with the lock, or took all memory."""
    a, _ = bundles
    path = a / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(bytes(plain_files.MOST + 1))
    if name == "docker-compose.yml":
        assert rotate_key(a).new.exists()  # the unit tells the name
        return
    with pytest.raises(StorageError, match=r"no plain file|65537 bytes, more than|a link to /dev/zero"):
        rotate_key(a)


def test_the_folder_of_keys_itself_is_no_bundle(bundles: tuple[Path, Path]) -> None:
    a, _ = bundles
    with pytest.raises(StorageError, match=rf"keys: the keys of a bundle\. Name the folder .* above it: {a}$"):
        rotate_key(a / "keys")
    assert stat.S_IMODE((a / "keys").stat().st_mode) == 0o700


@needs_root
def test_a_folder_that_is_replaced_while_the_call_waits_is_not_taken(
    bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, honest = bundles
    owned(HONEST, honest)
    before = contents(honest / "keys")

    @contextlib.contextmanager
    def swapped(folder: Path) -> Iterator[None]:
        folder.rename(a / "keys.x")
        folder.symlink_to(honest / "keys")
        os.chown(folder, THIEF, THIEF, follow_symlinks=False)
        yield

    monkeypatch.setattr(device, "alone", swapped)
    with pytest.raises(StorageError, match=rf"keys: a link of user {THIEF}"):
        rotate_key(a)
    assert contents(honest / "keys") == before


@needs_root
def test_what_is_put_in_place_of_the_folder_while_root_writes_gets_nothing(
    bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, honest = bundles
    owned(HONEST, honest)
    owned(THIEF, a)
    before = contents(honest / "keys")

    def swap(*_: object) -> None:
        (a / "keys").rename(a / "keys.x")
        (a / "keys").symlink_to(honest / "keys")

    for call, moment in ((rotate_key, "tidy"), (new_secret, "make_secret")):
        old = contents(a / "keys")
        with monkeypatch.context() as patched:
            make = getattr(device, moment)
            patched.setattr(device, moment, lambda path, make=make: (swap(), make(path)))
            made = call(a)
        assert contents(honest / "keys") == before
        (a / "keys").unlink()
        (a / "keys.x").rename(a / "keys")
        assert contents(a / "keys") != old
        assert {path.stat().st_uid for path in (a / "keys").iterdir()} == {THIEF}
        assert (made if isinstance(made, Path) else made.new).parent == a / "keys"


def test_messages_name_the_folder_that_is_written(bundles: tuple[Path, Path]) -> None:
    a, _ = bundles
    for end in ("key", "pub"):
        (a / "keys" / f"a-node.{end}").write_text("damaged")
    with pytest.raises(StorageError, match=rf"^{a}/keys/a-node\.pub: ") as caught:
        rotate_key(a)
    assert "/proc" not in str(caught.value)
    (a / "x").symlink_to(a / "keys")
    for place in (a / "x", a / "none", a / "x" / ".." / "keys"):
        with pytest.raises(StorageError, match="another folder or a link is in its place"), links.opened(place):
            pytest.fail("opened")


@needs_root
def test_a_first_key_in_a_bundle_of_roots_is_the_services(bundles: tuple[Path, Path]) -> None:
    a, _ = bundles
    for end in ("key", "pub"):
        (a / "keys" / f"a-node.{end}").unlink()
    owned(THIEF, a / "keys")
    rotate_key(a)
    assert {path.stat().st_uid for path in [a / "keys", *(a / "keys").iterdir()]} == {THIEF}


@needs_root
@pytest.mark.parametrize("above", [False, True])
def test_root_makes_no_keys_where_another_users_link_leads(
    tmp_path: Path, above: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    os.chown(link, THIEF, THIEF, follow_symlinks=False)
    folder, ca = str(link / "new" if above else link), tmp_path / "ca"
    signing.make_authority(ca)
    device_of = ["--superlink", "h:1", "--partition", "0", "--partitions", "1", str(ca / "ca.crt")]
    for words in (
        ["new-client", *device_of, folder, "porch"],
        ["federation", folder],
        ["authority", folder],
        ["server", str(ca), folder, "localhost"],
        ["client", str(ca), folder, "porch"],
        ["node", folder, "porch"],
    ):
        assert deploy(words) == 2
        assert f"{link}: a link of user {THIEF}, which user 0 does not follow" in capsys.readouterr().err
        assert not list(target.iterdir())


@needs_root
def test_federation_makes_no_keys_where_a_link_in_its_folder_leads(tmp_path: Path) -> None:
    root, target = tmp_path / "keys", tmp_path / "target"
    target.mkdir(mode=0o700)
    root.mkdir(mode=0o700)
    (root / "server").symlink_to(target)
    owned(THIEF, root)
    with pytest.raises(StorageError, match=rf"server: a link of user {THIEF}"):
        federation.prepare(root, [])
    assert not list(target.iterdir())
