"""What a second ``fedcross deploy federation`` finds changed, lost or damaged in its folder."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.trust import certificates, fields, keys, signing
from fedcross.core.trust.keys import KeyPair
from fedcross.deploy import federation
from fedcross.deploy.device import rotate_key
from tests.support.command import subcommand

deploy = subcommand("deploy")


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", ["pair", "folder"])
def test_the_names_of_a_lost_server_must_be_given(tmp_path: Path, lost: str) -> None:
    federation.prepare(tmp_path, [], ["fl.example.org"])
    server = tmp_path / "server"
    if lost == "folder":
        shutil.rmtree(server)
    else:
        (server / "server.crt").unlink()
        (server / "server.key").unlink()
    with pytest.raises(
        StorageError, match=r"server\.crt: missing, though .*superexec/ca\.crt is of a federation .*--names"
    ):
        federation.prepare(tmp_path, [])
    made = federation.prepare(tmp_path, [], ["fl.example.org"])
    assert str(server / "server.crt") in made
    assert "fl.example.org" in certificates.server_names(server / "server.crt")


def test_a_first_call_beside_an_authority_or_a_bundle_needs_no_names(tmp_path: Path) -> None:
    """In containers the folders are there and empty; a bundle may have been made here before."""
    authority = signing.make_authority(tmp_path / "authority")
    for name in federation.OWN[1:]:
        (tmp_path / name).mkdir(mode=0o700)
    bundle = tmp_path / "porch" / "keys"
    bundle.mkdir(parents=True)
    (bundle / "ca.crt").write_bytes(authority.public.read_bytes())
    assert str(tmp_path / "server" / "server.crt") in federation.prepare(tmp_path, [])


def test_an_authority_elsewhere_whose_files_are_put_here_needs_no_names(tmp_path: Path) -> None:
    """As docs/deploy.md says for who keeps ca.key on another machine."""
    authority = signing.make_authority(tmp_path / "elsewhere")
    root = tmp_path / "keys"
    signing.make_server(authority, root / "server", [*federation.INNER_NAMES, "fl.example.org"])
    for name in ("authority", "server"):
        (root / name).mkdir(mode=0o700, exist_ok=True)
        (root / name / "ca.crt").write_bytes(authority.public.read_bytes())
    before = (root / "server" / "server.crt").read_bytes()
    federation.prepare(root, ["client-1"])
    assert (root / "server" / "server.crt").read_bytes() == before


def test_every_file_that_was_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "keys"
    call = ["federation", str(root), "--device", "porch"]
    assert deploy(call) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(str(root / name) for name in contents(root))
    assert deploy(call) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    (root / "page" / "ca.crt").write_bytes(b"junk")
    (root / "operator" / "ca.crt").chmod(0o600)
    (root / "public" / "porch-node.pub").unlink()
    assert deploy(call) == 0
    files = ("public/porch-node.pub", "page/ca.crt", "operator/ca.crt")
    assert capsys.readouterr().out.splitlines() == [str(root / name) for name in files]


def test_a_rotated_key_reaches_the_public_folder_without_its_devices_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation.prepare(tmp_path, ["porch", "barn", "shed"])
    public = tmp_path / "public"
    before = contents(public)
    for name in ("porch", "shed"):
        rotate_key(tmp_path / name)
    (tmp_path / "barn").rename(tmp_path.with_name("on-the-device"))
    (tmp_path / "shed" / "shed-node.key").chmod(0o644)
    assert federation.prepare(tmp_path, []) == [str(public / "porch-node.pub")]
    assert (public / "porch-node.pub").read_bytes() == (tmp_path / "porch" / "porch-node.pub").read_bytes()
    after = contents(public)
    assert {name for name in before if before[name] != after[name]} == {"porch-node.pub"}
    assert "shed-node.key: mode 644" in (said := capsys.readouterr().err)
    assert "So its public key is not copied." in said


@pytest.mark.parametrize(
    ("damage", "says"),
    [("open", "mode 644"), ("junk", "no unencrypted PEM private key"), ("foreign", "this is not the key of")],
)
def test_a_bad_key_of_the_authority_is_told_and_can_be_put_away(tmp_path: Path, damage: str, says: str) -> None:
    federation.prepare(tmp_path, [])
    key = tmp_path / "authority" / "ca.key"
    if damage == "open":
        key.chmod(0o644)
    elif damage == "junk":
        key.write_bytes(b"junk")
    else:
        key.write_bytes(signing.make_authority(tmp_path.with_name("other")).private.read_bytes())
    before = contents(tmp_path)
    cure = "chmod 600" if damage == "open" else rf"Bring it back: without .* If it is lost, move {key} away"
    with pytest.raises(StorageError, match=rf"ca\.key: .*{says}.*{cure}"):
        federation.prepare(tmp_path, [], ["b.org"])
    assert contents(tmp_path) == before
    key.unlink()
    assert federation.prepare(tmp_path, []) == []


@pytest.mark.parametrize("early", ["server.crt", "ca.crt"])
def test_a_clock_that_is_behind_renews_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: str) -> None:
    """A good certificate looks like one that is not valid yet."""
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    later = datetime.now(UTC) + timedelta(days=3)
    if early == "ca.crt":
        monkeypatch.setattr(fields, "CLOCK_SKEW", -timedelta(days=3))
        signing.make_authority(authority.public.parent)
    else:
        federation.prepare(tmp_path, [])
        signing.make_server(authority, tmp_path / "server", federation.INNER_NAMES, now=later)
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=rf"{early}: valid from {later:%F} .*is this clock right"):
        federation.prepare(tmp_path, [])
    assert contents(tmp_path) == before
    if early == "ca.crt":
        with pytest.raises(StorageError, match="is this clock right"):
            signing.make_server(authority, tmp_path / "server", [])


def test_a_device_whose_key_alone_is_lost_is_told_so(tmp_path: Path) -> None:
    federation.prepare(tmp_path, ["porch"])
    for name in ("porch-node.key", "porch-node.pub"):
        (tmp_path / "porch" / name).unlink()
    with pytest.raises(StorageError, match=r"had a key, and .*porch/porch-node\.key is away\. Bring that back"):
        federation.prepare(tmp_path, ["porch"])
    (tmp_path / "public" / "porch-node.pub").rename(tmp_path / "old.pub")  # as the message says
    assert federation.prepare(tmp_path, ["porch"])
    certificates.check_key(tmp_path / "porch" / "porch-node.key")
    assert keys.read_public_key(tmp_path / "public" / "porch-node.pub") != keys.read_public_key(tmp_path / "old.pub")


def test_a_servers_pair_without_any_authority_is_not_replaced(tmp_path: Path) -> None:
    """Somebody put it there by hand and forgot ca.crt."""
    federation.prepare(tmp_path / "a", [])
    (tmp_path / "b").mkdir(mode=0o700)
    shutil.copytree(tmp_path / "a" / "server", tmp_path / "b" / "server", ignore=shutil.ignore_patterns("ca.crt"))
    before = contents(tmp_path / "b")
    with pytest.raises(StorageError, match=r"ca\.crt: missing, though .*server\.crt is there, which an authority"):
        federation.prepare(tmp_path / "b", [])
    assert contents(tmp_path / "b") == before
    (tmp_path / "b" / "authority").mkdir(mode=0o700)
    shutil.copy(tmp_path / "a" / "authority" / "ca.crt", tmp_path / "b" / "authority")
    assert str(tmp_path / "b" / "server" / "server.crt") not in federation.prepare(tmp_path / "b", [])


def test_files_that_nobody_may_write_stay(tmp_path: Path) -> None:
    federation.prepare(tmp_path, ["porch"])
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode & ~0o222)
    assert federation.prepare(tmp_path, ["porch"]) == []


@pytest.mark.parametrize(
    ("days", "names", "why"),
    [(80, ["b.org"], r"it lacks the name b\.org"), (None, ["a.org"], "it is to be made")],
)
def test_without_the_authoritys_key_it_says_what_the_key_is_for(
    tmp_path: Path, days: int | None, names: list[str], why: str
) -> None:
    federation.prepare(tmp_path, [])
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    server = tmp_path / "server"
    if days is None:
        (server / "server.crt").unlink()
        (server / "server.key").unlink()
    else:
        signing.make_server(authority, server, [*federation.INNER_NAMES], days)
    authority.private.unlink()
    with pytest.raises(
        StorageError, match=rf"server\.crt: {why}.*ca\.key: no such key file\. Bring the authority's key"
    ):
        federation.prepare(tmp_path, [], names)


def test_a_new_authority_beside_copies_of_another_one_says_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation.prepare(tmp_path, [])
    shutil.rmtree(tmp_path / "authority")
    capsys.readouterr()
    assert deploy(["authority", str(tmp_path / "authority")]) == 0
    assert "is of another authority: devices that trust that one are locked out" in capsys.readouterr().err
    for name in ("one", "two"):  # none of them has copies
        assert deploy(["authority", str(tmp_path / "new" / name)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", [[], ["fl.example.org"]])
def test_a_valid_pair_stays_where_the_authoritys_key_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    """Else nothing starts for the last month of a good certificate."""
    root, away = tmp_path / "keys", tmp_path / "away"
    federation.prepare(root, [], ["fl.example.org"])
    authority = KeyPair(root / "authority" / "ca.crt", root / "authority" / "ca.key")
    signing.make_server(authority, root / "server", [*federation.INNER_NAMES, "fl.example.org"], 25)
    away.mkdir(mode=0o700)
    for path in (authority.public, authority.private):
        shutil.copy(path, away)
    authority.private.unlink()
    before = contents(root)
    assert federation.prepare(root, [], given) == []
    assert contents(root) == before
    said = capsys.readouterr().err
    assert f"server.crt: 24 days left, and {authority.private} is not here to sign a new one" in said
    words = said.split("where it is: fedcross ")[1].split(", and put")[0].split()
    assert words[-1] == "fl.example.org"
    places = {"AUTHORITY": str(away), "FOLDER": str(tmp_path / "new")}
    assert deploy([places.get(word, word) for word in words[1:]]) == 0
    for name in ("server.crt", "server.key"):
        shutil.copy(tmp_path / "new" / name, root / "server")
    capsys.readouterr()
    assert federation.prepare(root, [], given) == []
    assert capsys.readouterr().err == ""


def test_a_lost_key_is_the_reason_for_a_new_certificate(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    for name in ("server/server.key", "authority/ca.key"):
        (tmp_path / name).unlink()
    with pytest.raises(StorageError, match=r"server\.crt: server\.key is lost, so it is to be signed anew"):
        federation.prepare(tmp_path, [])


def test_an_expired_pair_does_not_stay(tmp_path: Path) -> None:
    federation.prepare(tmp_path, [])
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    then = datetime.now(UTC) - timedelta(days=3)
    signing.make_server(authority, tmp_path / "server", federation.INNER_NAMES, 2, then)
    authority.private.unlink()
    with pytest.raises(StorageError, match="it is not good any more, so it is to be signed anew"):
        federation.prepare(tmp_path, [])


def test_the_docs_command_for_an_authority_elsewhere_makes_what_federation_keeps(tmp_path: Path) -> None:
    assert deploy(["authority", str(tmp_path / "ca")]) == 0
    root = tmp_path / "keys"
    assert deploy(["server", str(tmp_path / "ca"), str(tmp_path / "made"), "fl.example.org"]) == 0
    for folder in ("authority", "server"):
        (root / folder).mkdir(mode=0o700, parents=True)
        shutil.copy(tmp_path / "ca" / "ca.crt", root / folder)
    for name in ("server.crt", "server.key"):
        shutil.copy(tmp_path / "made" / name, root / "server")
    pair = (root / "server" / "server.key").read_bytes()
    assert federation.prepare(root, [], ["fl.example.org"])
    assert (root / "server" / "server.key").read_bytes() == pair


@pytest.mark.parametrize("name", ["2001:DB8:0::1", "FL.Example.org", "2001:0db8::0:1"])
def test_another_spelling_of_a_name_is_no_new_name(tmp_path: Path, name: str) -> None:
    federation.prepare(tmp_path, [], [name])
    assert federation.prepare(tmp_path, [], [name]) == []
    assert federation.prepare(tmp_path, [], [name.lower()]) == []


@pytest.mark.parametrize("name", ["server/server.crt", "d/porch.crt"])
def test_a_certificate_that_begins_later_is_made_again_by_the_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    federation.prepare(tmp_path, [], ["fl.example.org"])
    authority = KeyPair(tmp_path / "authority" / "ca.crt", tmp_path / "authority" / "ca.key")
    with monkeypatch.context() as patch:
        patch.setattr(fields, "CLOCK_SKEW", -timedelta(days=3))
        if name == "d/porch.crt":
            signing.make_client(authority, tmp_path / "d", "porch")
        else:
            signing.make_server(authority, tmp_path / "server", [*federation.INNER_NAMES, "fl.example.org"])
    with pytest.raises(StorageError, match=r"is this clock right\? If it is, make it again: ") as error:
        certificates.check_certificate(tmp_path / name, authority.public)
    command = str(error.value).split("make it again: fedcross deploy ")[1].split()
    assert deploy(command) == 0
    assert certificates.check_certificate(tmp_path / name, authority.public)
    assert federation.prepare(tmp_path, [], ["fl.example.org"]) == []


def test_an_authority_that_begins_later_has_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my authority"
    with monkeypatch.context() as patch:
        patch.setattr(fields, "CLOCK_SKEW", -timedelta(days=3))
        signing.make_authority(folder)
    with pytest.raises(StorageError, match=r"clock right.* wait until then, or move the files in .* away") as error:
        certificates.check_begun(folder / "ca.crt")
    assert f"(fedcross deploy authority '{folder}')" in str(error.value)
    (folder / "ca.key").unlink()
    with pytest.raises(StorageError, match=r"clock right.* copy the ca\.crt from where the authority is"):
        certificates.check_begun(folder / "ca.crt")
