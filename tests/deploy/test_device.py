from __future__ import annotations

import contextlib
import io
import os
import shlex
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedcross.core.errors import ConfigError, FederationError, StorageError
from fedcross.core.private_files import give
from fedcross.core.trust import certificates, signing
from fedcross.core.trust.admission import fingerprint
from fedcross.core.trust.keys import KeyPair, make_node_key, public_line
from fedcross.deploy import device, nodes
from fedcross.deploy.actions import devices
from fedcross.deploy.device import Device, new_client, rotate_key
from fedcross.deploy.kubernetes.plan import read_bundle
from fedcross.server.commands import doctor
from tests.support.command import subcommand
from tests.support.disk import largest_file

deploy = subcommand("deploy")

PORCH = Device("porch", "fl.example.org:8443", 3, 4)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return signing.make_authority(tmp_path / "ca").public


@pytest.fixture
def bundle(authority: Path, tmp_path: Path) -> Path:
    return new_client(PORCH, authority, tmp_path / "devices")


def test_the_bundle_is_closed_and_whole(bundle: Path, authority: Path) -> None:
    modes = {p.relative_to(bundle).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in [bundle, *bundle.rglob("*")]}
    assert {name for name, mode in modes.items() if mode == 0o700} == {".", "keys", "data", "state", "own"}
    assert modes["keys/porch-node.key"] == modes["keys/superexec.key"] == 0o600
    assert set(modes) == {
        ".", "keys", "data", "state", "own", "keys/ca.crt", "keys/porch-node.key", "keys/porch-node.pub",
        "keys/superexec.key",
        "docker-compose.yml", ".env", "fedcross-porch.service", "README.md",
    }  # fmt: skip
    assert (bundle / "keys" / "ca.crt").read_bytes() == authority.read_bytes()


def test_its_container_may_do_nothing_but_its_work(bundle: Path) -> None:
    service = yaml.safe_load((bundle / "docker-compose.yml").read_text())["services"]["porch"]
    assert service["command"] == [
        "fedcross", "deploy",
        "supernode", "--name=porch", "--superlink=fl.example.org:8443", "--partition=3", "--partitions=4",
        "/keys/device",
    ]  # fmt: skip
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "${DEVICE_USER:-1000:1000}"
    assert "ports" not in service
    assert {"mem_limit", "cpus", "pids_limit", "shm_size"} <= set(service)


def test_its_service_starts_the_same_command(bundle: Path) -> None:
    text = (bundle / "fedcross-porch.service").read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert "supernode --name=porch --superlink=fl.example.org:8443 --partition=3 --partitions=4" in command
    assert {"NoNewPrivileges=yes", "CPUQuota=100%", "MemoryMax=4G"} <= set(text.splitlines())
    # Another user's idle sockets on the SuperNode's port take one each, and nobody closes them.
    assert "LimitNOFILE=65536" in text.splitlines()
    assert "$" not in text


def test_a_small_device_says_how_wide_a_model_it_can_train(authority: Path, tmp_path: Path, bundle: Path) -> None:
    where = ["--superlink", "h:1", "--partition", "0", "--partitions", "2", "--width", "0.4"]
    assert deploy(["new-client", *where, str(authority), str(tmp_path / "d"), "phone"]) == 0
    phone = tmp_path / "d" / "phone"
    service = yaml.safe_load((phone / "docker-compose.yml").read_text())["services"]["phone"]
    assert service["command"][-2:] == ["--width=0.4", "/keys/device"]
    assert "--partitions=2 --width=0.4 /etc/fedcross/phone/keys" in (phone / "fedcross-phone.service").read_text()
    assert (read_bundle(phone).width, read_bundle(bundle).width) == ("0.4", None)


def test_the_page_in_it_names_the_command_for_the_server(bundle: Path) -> None:
    text = (bundle / "README.md").read_text()
    assert "docker compose run --rm -T admin register --partition 3 - < porch-node.pub" in text
    assert "(number 3 of 0 to 3)" in text


def test_doctor_does_not_ask_a_device_for_what_the_image_leaves_out() -> None:
    text = (Path(__file__).parents[2] / "Dockerfile").read_text()
    without = text.split(" --extra data --without ")[1].split()[:2]
    assert set(without) == set(doctor.NOT_ON_DEVICES)


def test_both_ways_to_start_it_know_the_folder_of_own_methods(bundle: Path) -> None:
    service = yaml.safe_load((bundle / "docker-compose.yml").read_text())["services"]["porch"]
    assert "./own:/own:ro" in service["volumes"]
    assert service["environment"] == {"FEDCROSS_PATH": "/own"}
    assert "FEDCROSS_PATH=/etc/fedcross/porch/own" in (bundle / "fedcross-porch.service").read_text()


def test_the_check_that_its_page_names_is_one_that_doctor_takes(bundle: Path) -> None:
    lines = (bundle / "README.md").read_text().splitlines()
    asked = [shlex.split(line.split("fedcross doctor ")[1]) for line in lines if "fedcross doctor " in line]
    assert [doctor._parser().parse_args(one).superlink for one in asked] == ["fl.example.org:8443"] * 2
    assert [doctor._parser().parse_args(one).device for one in asked] == [Path("/keys/device"), Path("keys")]


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (Device("a b", "h:1", 0, 1), "use a to z"),
        (Device("a", "https://h", 0, 1), "HOST:PORT"),
        (Device("a", "h", 0, 1), "HOST:PORT"),
        (Device("a", "h:1", 1, 1), "numbered 0 to 0"),
        (Device("a", "h:1", -1, 1), "numbered 0 to 0"),
        (Device("a", "h:1", 10**9, 10**10), "--partition 1000000000: give a number from 0 to 999999999"),
        (Device("a", "h:1", 0, 1, 0.0), "--width 0: give a number above 0, up to 1"),
        (Device("a", "h:1", 0, 1, float("nan")), "--width nan: give a number"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_written(
    device: Device, says: str, authority: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, FederationError), match=says):
        new_client(device, authority, tmp_path / "devices")
    assert not (tmp_path / "devices").exists()


def test_a_bundle_is_never_overwritten(bundle: Path, authority: Path) -> None:
    before = (bundle / "keys" / "porch-node.key").read_bytes()
    with pytest.raises(StorageError, match="rotate-key"):
        new_client(PORCH, authority, bundle.parent)
    assert (bundle / "keys" / "porch-node.key").read_bytes() == before


def test_rotation_gives_a_new_key_and_keeps_the_old_public_one(bundle: Path) -> None:
    keys = bundle / "keys"
    before, secret = (keys / "porch-node.pub").read_bytes(), (keys / "porch-node.key").read_bytes()
    new, old, _ = rotate_key(bundle)
    assert old.read_bytes() == before
    assert new.read_bytes() != before
    assert (keys / "porch-node.key").read_bytes() != secret
    assert stat.S_IMODE((keys / "porch-node.key").stat().st_mode) == 0o600
    with pytest.raises(StorageError, match="Name the folder"):
        rotate_key(keys)


def test_a_new_key_has_the_owner_of_the_old_one_whoever_makes_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root rotates the key of a device whose container runs as another user."""
    before, given = (bundle / "keys" / "porch-node.key").stat().st_ino, {}
    monkeypatch.setattr("fedcross.deploy.device.give", lambda path, owner: given.update({path.name: owner.st_ino}))
    rotate_key(bundle)
    names = {"porch-node.key", "porch-node.pub", "porch-node-old.pub"}
    assert given == dict.fromkeys(names, before)
    (bundle / "keys" / "superexec.key").unlink()
    rotate_key(bundle)
    assert "superexec.key" in given  # now it is one that the call has written


def test_a_file_is_given_to_the_owner_of_another_or_the_message_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Path, int, int]] = []
    monkeypatch.setattr("os.chown", lambda *told, **_: given.append(told))
    (tmp_path / "key").touch()
    own = (tmp_path / "key").stat()
    other = os.stat_result((*own[:4], own.st_uid + 1, own.st_gid, *own[6:]))
    give(tmp_path / "key", own)
    assert not given
    give(tmp_path / "key", other)
    assert given == [(tmp_path / "key", own.st_uid + 1, own.st_gid)]

    (tmp_path / "link").symlink_to(tmp_path / "key")
    give(tmp_path / "link", other)
    assert len(given) == 1
    (tmp_path / "second").hardlink_to(tmp_path / "key")
    give(tmp_path / "second", other)
    assert len(given) == 1
    (tmp_path / "second").unlink()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.chown", refused)
    with pytest.raises(StorageError, match=rf"chown {own.st_uid + 1}:{own.st_gid} "):
        give(tmp_path / "key", other)


def test_an_old_bundle_gets_its_secret_with_its_next_key_and_a_new_one_keeps_its_own(bundle: Path) -> None:
    secret = bundle / "keys" / "superexec.key"
    before = secret.read_bytes()
    rotate_key(bundle)
    assert secret.read_bytes() == before
    secret.unlink()  # as version 0.2 made bundles
    rotate_key(bundle)
    assert (len(secret.read_bytes()), stat.S_IMODE(secret.stat().st_mode)) == (32, 0o600)


def test_command(authority: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o022)
    try:
        where = ["--superlink", "h:1", "--partition", "0", "--partitions", "2"]
        assert deploy(["new-client", *where, str(authority), str(tmp_path / "d"), "pi-1"]) == 0
        assert "admin register --partition 0 - < pi-1-node.pub" in capsys.readouterr().out
        assert deploy(["rotate-key", str(tmp_path / "d" / "pi-1")]) == 0
        assert "revoke it" in capsys.readouterr().out
        assert deploy(["nodes"]) == 2
        assert "Which SuperLink?" in capsys.readouterr().err
    finally:
        os.umask(before)


class FakeSuperLink:
    """What ``fedcross.deploy.nodes`` needs of Flower's Control API, with nodes numbered from 1."""

    def __init__(self) -> None:
        self.known: list[SimpleNamespace] = []

    def ListNodes(self, request: object) -> SimpleNamespace:
        return SimpleNamespace(nodes_info=self.known)

    def RegisterNode(self, request: object) -> SimpleNamespace:
        key, name = request.public_key, request.name  # type: ignore[attr-defined]
        if key in [node.public_key for node in self.known]:  # a revoked one, as Flower answers
            asked = httpx.Request("POST", "https://superlink/v1/control/register-node")
            reply = httpx.Response(400, json={"code": 23, "detail": "Public key already in use."}, request=asked)
            reply.raise_for_status()
        node = SimpleNamespace(node_id=len(self.known) + 1, status="registered", public_key=key, name=name)
        self.known.append(node)
        return SimpleNamespace(node_id=len(self.known))

    def UnregisterNode(self, request: object) -> None:
        self.known[request.node_id - 1].status = "unregistered"  # type: ignore[attr-defined]


def test_registering_twice_is_one_node_and_a_revoked_key_is_gone(bundle: Path) -> None:
    key = nodes.read_public_key((bundle / "keys" / "porch-node.pub").read_bytes(), "porch")
    link = FakeSuperLink()
    assert nodes.register(link, key) == (nodes.Node(1, "registered", key), True)  # type: ignore[arg-type]
    assert nodes.register(link, key) == (nodes.Node(1, "registered", key), False)  # type: ignore[arg-type]
    assert [node.fingerprint for node in nodes.listing(link)] == [fingerprint(key)]  # type: ignore[arg-type]
    assert nodes.revoke(link, key) == 1  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="it was revoked, and a revoked key is never accepted again"):
        nodes.register(link, key)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="no registered node has it"):
        nodes.revoke(link, key)  # type: ignore[arg-type]


def test_a_partition_belongs_to_one_key_until_that_is_revoked() -> None:
    link: Any = FakeSuperLink()
    assert nodes.register(link, b"a", 3)[0].partition == 3
    assert nodes.register(link, b"a", 3) == (nodes.Node(1, "registered", b"a", 3), False)
    with pytest.raises(FederationError, match="partition 3: it belongs to key"):
        nodes.register(link, b"b", 3)
    with pytest.raises(FederationError, match="registered for partition 3, and this cannot be changed"):
        nodes.register(link, b"a", 4)
    assert nodes.register(link, b"b", 4)[1]
    nodes.revoke(link, b"a")
    assert nodes.register(link, b"c", 3) == (nodes.Node(3, "registered", b"c", 3), True)
    assert [node.partition for node in nodes.alive(nodes.listing(link))] == [4, 3]
    unbound, _ = nodes.register(link, b"d")
    assert unbound.partition is None
    assert nodes.register(link, b"d", 5) == (unbound, False)  # an older version registered it; the command says so


def test_the_command_binds_each_key_to_its_partition(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = FakeSuperLink()
    monkeypatch.setattr(nodes, "connect", lambda *_: contextlib.nullcontext(link))
    where = ["--superlink", "h:1", "--authority", "ca.crt"]
    key = str(bundle / "keys" / "porch-node.pub")
    assert deploy(["register", *where, "--partition", "3", key]) == 0
    assert f"{key}: node 1, partition 3" in capsys.readouterr().out
    assert link.known[0].name == "partition-3"
    for wrong in (["--partition", "3", "--partition", "4"], ["--partition", "-1"]):
        assert deploy(["register", *where, *wrong, key]) == 2
        assert "give one number from 0 to 999999999 for each of the 1 keys" in capsys.readouterr().err
    assert deploy(["nodes", *where]) == 0
    assert "partition 3" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "good"), [("register", ["porch-node.pub"]), ("revoke", [])])
def test_a_bad_file_shows_before_the_server_is_asked(
    command: str, good: list[str], bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "connect", lambda *_: pytest.fail("asked"))
    where = ["--superlink", "h:1", "--authority", "ca.crt"]
    assert deploy([command, *where, *(str(bundle / "keys" / name) for name in good), str(bundle / "none.pub")]) == 2
    assert "none.pub: this key cannot be read" in capsys.readouterr().err


def test_keys_that_must_not_or_cannot_be_registered(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="It must never leave"):
        nodes.read_public_key((bundle / "keys" / "porch-node.key").read_bytes(), "x")
    with pytest.raises(ConfigError, match="no OpenSSH public key"):
        nodes.read_public_key(b"junk", "x")
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    with pytest.raises(ConfigError, match="NIST curve"):
        nodes.read_public_key(other, "x")


def test_a_key_from_standard_input(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (bundle / "keys" / "porch-node.pub").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    [(name, key)] = devices.public_keys(["-"])
    assert (name, key) == ("-", nodes.read_public_key(content, "x"))


def test_a_key_that_may_be_registered_survives_every_rotation(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = bundle / "keys"
    made = [(keys / "porch-node.pub").read_bytes()]
    made += [rotate_key(bundle)[0].read_bytes() for _ in range(3)]
    names = ("porch-node-old.pub", "porch-node-old-2.pub", "porch-node-old-3.pub", "porch-node.pub")
    assert [(keys / name).read_bytes() for name in names] == made
    assert deploy(["rotate-key", str(bundle)]) == 0
    assert "old-4.pub: revoke it (or the one beside it that nodes lists for its partition)" in capsys.readouterr().out


def test_a_rotation_that_is_tried_again_keeps_one_old_key(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("cannot be written")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(device, "make_node_key", full)
        rotate_key(bundle)
    assert rotate_key(bundle)[1].name == "porch-node-old.pub"


def test_a_bundle_that_could_not_be_made_is_not_in_the_way(authority: Path, tmp_path: Path) -> None:
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        new_client(PORCH, authority, tmp_path / "devices")
    assert not list((tmp_path / "devices").iterdir())
    assert rotate_key(new_client(PORCH, authority, tmp_path / "devices"))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("$(id):1", "neither an IP address nor a host name"),
        ("a;id:1", "neither an IP address nor a host name"),
        ('a"b:1', "neither an IP address nor a host name"),
        ("tür.example.org:1", "neither an IP address nor a host name"),
        ("a_b:1", "neither an IP address nor a host name"),
        ("h:0", "there is no port 0"),
        ("h:x", "expected HOST:PORT"),
    ],
)
def test_an_address_that_no_certificate_can_have_is_wrong_use(
    address: str, says: str, authority: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--superlink", address, "--partition", "0", "--partitions", "1", str(authority), str(tmp_path / "d")]
    assert deploy(["new-client", *where, "porch"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("address", ["192.0.2.7:8443", "[2001:db8::1]:8443", "localhost:1"])
def test_addresses_of_machines(address: str, authority: Path, tmp_path: Path) -> None:
    bundle = new_client(Device("porch", address, 0, 1), authority, tmp_path / "d")
    assert f"--superlink={address} " in (bundle / "fedcross-porch.service").read_text()


def test_a_bundle_gets_the_authoritys_certificate_and_nothing_else(authority: Path, tmp_path: Path) -> None:
    own = KeyPair(authority, authority.with_name("ca.key"))
    server = signing.make_server(own, tmp_path / "server", [])
    with pytest.raises(StorageError, match=r"server\.crt: not the certificate of an authority"):
        new_client(PORCH, server.public, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    both = tmp_path / "mix.crt"
    both.write_bytes(authority.read_bytes() + own.private.read_bytes())
    given = new_client(PORCH, both, tmp_path / "d") / "keys" / "ca.crt"
    assert given.read_bytes() == authority.read_bytes()


def test_of_two_authorities_in_one_file_none_is_taken(authority: Path, tmp_path: Path) -> None:
    """The second one would be missing in the bundle, and be no one's that anything here signs."""
    other = signing.make_authority(tmp_path / "other").public
    both = tmp_path / "both.crt"
    both.write_bytes(authority.read_bytes() + other.read_bytes())
    with pytest.raises(StorageError, match=r"both\.crt: 2 certificates in one file"):
        new_client(PORCH, both, tmp_path / "devices")


def test_a_bundle_is_not_made_where_others_may_rename_it(authority: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StorageError, match=r"mode 777, so others .*chmod o-w"):
        new_client(PORCH, authority, tmp_path / "open")
    assert not any((tmp_path / "open").iterdir())


@pytest.mark.parametrize("content", [b"junk", None, "barn"])
def test_the_old_public_key_is_the_private_keys_own(bundle: Path, authority: Path, content: bytes | str | None) -> None:
    public = bundle / "keys" / "porch-node.pub"
    before = public.read_bytes()
    barn = new_client(Device("barn", "h:1", 0, 1), authority, bundle.parent) / "keys" / "barn-node.pub"
    public.unlink()
    if content is not None:
        public.write_bytes(barn.read_bytes() if isinstance(content, str) else content)
    new, old, _ = rotate_key(bundle)
    assert old.read_bytes() == before
    assert new.read_bytes() != before
    certificates.check_key(bundle / "keys" / "porch-node.key")


def test_of_a_key_and_a_pub_that_differ_both_are_kept(bundle: Path, authority: Path) -> None:
    """Another device's key was copied here: porch-node.pub is the one that is registered."""
    keys = bundle / "keys"
    registered = (keys / "porch-node.pub").read_bytes()
    barn = new_client(Device("barn", "h:1", 0, 1), authority, bundle.parent) / "keys" / "barn-node.key"
    (keys / "porch-node.key").write_bytes(barn.read_bytes())
    rotation = rotate_key(bundle)
    assert (rotation.old.name, rotation.other) == ("porch-node-old-2.pub", keys / "porch-node-old.pub")
    assert (keys / "porch-node-old.pub").read_bytes() == registered


def test_a_damaged_key_is_replaced_and_its_public_key_kept(bundle: Path) -> None:
    keys = bundle / "keys"
    before = (keys / "porch-node.pub").read_bytes()
    (keys / "porch-node.key").write_bytes(b"junk")
    assert rotate_key(bundle)[1].read_bytes() == before
    (keys / "porch-node.key").write_bytes(b"junk")
    (keys / "porch-node.pub").unlink()
    with pytest.raises(StorageError, match="no unencrypted OpenSSH private key"):
        rotate_key(bundle)


def test_a_lost_key_is_replaced_and_its_public_key_kept(bundle: Path) -> None:
    keys = bundle / "keys"
    before = (keys / "porch-node.pub").read_bytes()
    (keys / "porch-node.key").unlink()
    with pytest.raises(StorageError, match=rf"fedcross deploy rotate-key {bundle} makes a new one and keeps this file"):
        make_node_key(keys, "porch")
    new, old, _ = rotate_key(bundle)
    assert old.read_bytes() == before
    assert new.read_bytes() == public_line(keys / "porch-node.key", "porch") != before
    (keys / "porch-node.key").unlink()
    make_node_key(keys, "barn")
    (keys / "barn-node.key").unlink()
    with pytest.raises(StorageError, match="is lost, revoke this key and remove this file"):
        make_node_key(keys, "barn")


def test_a_rotation_that_fails_leaves_no_old_key(bundle: Path) -> None:
    keys = bundle / "keys"
    before = {path: path.read_bytes() for path in keys.iterdir()}
    keys.chmod(0o755)
    with pytest.raises(StorageError, match="chmod 700"):
        rotate_key(bundle)
    assert {path: path.read_bytes() for path in keys.iterdir()} == before


def test_a_key_that_is_a_link_is_not_rotated(bundle: Path, tmp_path: Path) -> None:
    key = bundle / "keys" / "porch-node.key"
    key.rename(tmp_path / "vault.key")
    key.symlink_to(tmp_path / "vault.key")
    with pytest.raises(StorageError, match=r"a link to .*vault\.key, where the old key would stay"):
        rotate_key(bundle)


def test_rotations_at_once_wait_for_each_other(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits before it replaces the key, so that without a lock both would keep the same old one."""
    make = make_node_key

    def slowly(*given: Any) -> KeyPair:
        time.sleep(0.1)
        return make(*given)

    monkeypatch.setattr(device, "make_node_key", slowly)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(rotate_key, [bundle] * 4))
    assert len({one.old for one in done}) == 4
    assert len({one.old.read_bytes() for one in done}) == 4
    certificates.check_key(bundle / "keys" / "porch-node.key")


def test_a_file_of_two_keys_is_refused(bundle: Path) -> None:
    line = (bundle / "keys" / "porch-node.pub").read_bytes()
    assert nodes.read_public_key(line + b"\n", "x") == nodes.read_public_key(line, "x")
    with pytest.raises(ConfigError, match="2 lines, and a device has one key"):
        nodes.read_public_key(line + line, "x")


def test_a_key_that_was_revoked_already_is_told_from_one_that_nobody_registered() -> None:
    link: Any = FakeSuperLink()
    nodes.register(link, b"a")
    nodes.revoke(link, b"a")
    with pytest.raises(FederationError, match=r"no registered node has it\. It was revoked already"):
        nodes.revoke(link, b"a")
    with pytest.raises(FederationError, match=r"no registered node has it\. Was another one registered"):
        nodes.revoke(link, b"b")
