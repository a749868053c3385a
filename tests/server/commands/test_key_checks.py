"""What ``fedcross doctor --keys`` says of a folder of keys and certificates."""

import json
import shutil
from datetime import timedelta

import pytest

from fedcross.core.errors import StorageError
from fedcross.core.trust import issued
from fedcross.core.trust.keys import KeyPair, make_node_key
from fedcross.core.trust.signing import make_authority, make_client, make_server
from fedcross.deploy import federation
from fedcross.deploy.device import Device, new_client
from fedcross.deploy.federation import gateway_token
from fedcross.deploy.revocation import revoke
from fedcross.server.commands import doctor, key_checks
from tests.support.command import subcommand

main = subcommand("deploy")


def kinds(findings):
    return [finding.kind for finding in findings]


def faults(folder, authority=None):
    return [finding.text for finding in key_checks.check_keys(folder, authority) if finding.kind == "FAULT"]


@pytest.fixture
def keys(tmp_path):
    authority = make_authority(tmp_path / "ca")
    make_server(authority, tmp_path / "server", ["superlink.example.org"])
    make_node_key(tmp_path / "server", "device-1")
    gateway_token(tmp_path / "server")
    shutil.copy(authority.public, tmp_path / "server")
    return tmp_path / "server", authority.public


def test_good_keys(keys):
    assert kinds(key_checks.check_keys(*keys)) == ["ok"] * 6  # the folder, two keys, two certificates, one token


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("name", ["page/token", "superexec/superexec.key", "server/gateway.token"])
def test_a_folder_in_the_place_of_a_token_is_a_fault(tmp_path, name, mode):
    federation.prepare(tmp_path, [])
    path = tmp_path / name
    path.unlink()
    path.mkdir(mode=mode)
    (found,) = faults(path.parent)
    assert found.startswith(f"{path}: is a folder, not a file (Docker makes one for a file that was missing")
    assert f"rmdir {path}" in found
    assert "chmod" not in found


def test_another_thing_in_the_place_of_a_token_is_not_to_be_removed(tmp_path):
    federation.prepare(tmp_path, [])
    path = tmp_path / "operator" / "token"
    shutil.copy(tmp_path / "server" / "server.key", path)
    (found,) = faults(path.parent)
    assert found.startswith(f"{path}: a private key, in the place of a token. Move it to where it belongs")


def test_an_open_key_and_a_foreign_authority(keys, tmp_path):
    folder, authority = keys
    (folder / "server.key").chmod(0o644)
    other = make_authority(tmp_path / "other").public
    found = [f.text for f in key_checks.check_keys(folder, other) if f.kind == "FAULT"]
    assert len(found) == 3
    assert "chmod 600" in found[0]
    assert f"ca.crt: not signed by {other}. It is another authority's. Put the federation's ca.crt there" in found[1]
    assert f"server.crt: not signed by {other}. It or {other} is another authority's: fedcross deploy" in found[2]
    assert len([f for f in key_checks.check_keys(folder, authority) if f.kind == "FAULT"]) == 1


def test_a_key_of_another_certificate(keys):
    folder, authority = keys
    other = make_server(KeyPair(authority, authority.with_name("ca.key")), folder.parent / "other", [])
    (folder / "server.key").write_bytes(other.private.read_bytes())
    (found,) = [f for f in key_checks.check_keys(*keys) if f.kind == "FAULT"]
    assert found.text.startswith(f"{folder / 'server.key'}: this is not the key of {folder / 'server.crt'}")


def test_a_certificate_that_ends_soon(keys, monkeypatch):
    monkeypatch.setattr(key_checks, "SOON", timedelta(days=91))
    (found,) = [f for f in key_checks.check_keys(*keys) if f.kind == "FAULT"]
    assert f"Renew it: fedcross deploy federation {keys[0].parent} does, with ca.key in" in found.text


def test_no_keys(tmp_path):
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "FAULT" in kinds(key_checks.check_keys(tmp_path / "empty", None))
    assert kinds(key_checks.check_keys(tmp_path / "none", None)) == ["FAULT"]


def test_a_list_of_revoked_certificates(tmp_path):
    authority = make_authority(tmp_path / "ca")
    porch = make_client(authority, tmp_path / "d", "porch")
    crl, _ = revoke(authority, porch.public)
    told = {finding.text.split(": ")[0]: finding for finding in key_checks.check_keys(tmp_path / "ca", None)}
    assert (told[str(crl)].kind, told[str(crl)].text.endswith("89 days left")) == ("ok", True)
    revoke(authority, None, days=3)
    (soon,) = [f.text for f in key_checks.check_keys(tmp_path / "ca", None) if f.kind == "FAULT"]
    assert "Sign it again: fedcross deploy revoke-certificate" in soon
    (found,) = [f.text for f in key_checks.check_keys(tmp_path / "d", authority.public) if f.kind == "FAULT"]
    assert found.startswith(f"{porch.public}: revoked on ")


def test_a_folder_without_the_authoritys_certificate(tmp_path):
    authority = make_authority(tmp_path / "ca")
    for name in ("porch", "barn"):
        make_client(authority, tmp_path / "d", name)
    (found,) = [f.text for f in key_checks.check_keys(tmp_path / "d", None) if f.kind == "FAULT"]
    assert found.endswith("Name the authority's certificate with --authority.")


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("server/server.key", "missing. Bring it back, or make a new pair: fedcross deploy federation keeps the names"),
        ("server/server.crt", "missing. Bring it back, or make a new pair: fedcross deploy federation with --names"),
        ("server/gateway.token", "missing, so who reaches the SuperLink's port can call as a device."),
        ("authority/ca.crt", "missing. Bring it back: any copy of the federation's ca.crt is as good."),
        ("porch/porch-node.key", "rotate-key"),
    ],
)
def test_half_of_what_belongs_together(tmp_path, lost, says):
    federation.prepare(tmp_path, ["porch"], ["fl.example.org"])
    path = tmp_path / lost
    assert faults(path.parent) == []
    path.unlink()
    (found,) = faults(path.parent)
    if lost.endswith("node.key"):
        assert found.startswith(f"{path.with_suffix('.pub')}: its private key porch-node.key is away.")
    else:
        assert found.startswith(f"{path}: ")
    assert says in found
    assert faults(tmp_path / "public") == []  # public keys alone, as they should be there


def test_damaged_records_of_the_authority(tmp_path):
    authority = make_authority(tmp_path / "ca")
    porch = make_client(authority, tmp_path / "d", "porch")
    record = tmp_path / "ca" / issued.FILE
    good = json.loads(record.read_text())
    record.write_text("[{")
    (found,) = faults(tmp_path / "ca")
    assert found.startswith(f"{record}: no readable list of certificates")
    record.write_text(json.dumps(good))
    revoke(authority, porch.public)
    assert set(kinds(key_checks.check_keys(tmp_path / "ca", None))) == {"ok"}
    record.unlink()
    (told,) = [one.text for one in key_checks.check_keys(tmp_path / "ca", None) if one.kind != "ok"]
    assert told.startswith(f"{record}: missing, so revoke-certificate revokes no certificate of a device but those")


def test_two_authorities_in_one_file(tmp_path):
    federation.prepare(tmp_path, [])
    path = tmp_path / "superexec" / "ca.crt"
    path.write_bytes(path.read_bytes() + make_authority(tmp_path / "other").public.read_bytes())
    assert faults(path.parent) == [f"{path}: 2 certificates in one file. Give each a file of its own."]


@pytest.mark.parametrize(
    ("name", "token", "number"),
    [("operator", "sesame", 1), ("operator", "s" * 16, 1), ("page", "s" * 15, 1), ("page", "s" * 16, 0)],
)
def test_a_short_token_is_good_for_the_page_alone_and_a_very_short_one_for_nothing(
    tmp_path, monkeypatch, name, token, number
):
    federation.prepare(tmp_path, [])
    path = tmp_path / name / "token"
    path.write_text(token)
    assert len(faults(path.parent)) == number
    monkeypatch.chdir(path.parent)
    assert len(faults(path.parent.relative_to(path.parent))) == number  # also as "."


def test_the_root_of_a_federation_names_its_folders(tmp_path):
    federation.prepare(tmp_path, [])
    (found,) = faults(tmp_path)
    parts = " ".join(str(tmp_path / name) for name in sorted(federation.OWN))
    assert found == f"{tmp_path}: the keys are in its folders. Name those: fedcross doctor --keys {parts}"


def test_an_authority_that_ends_within_90_days_is_told_of(tmp_path):
    for days, kind in ((92, "ok"), (80, "note"), (5, "FAULT")):
        make_authority(tmp_path / str(days), days)
        found = {one.text.split(":")[0]: one for one in key_checks.check_keys(tmp_path / str(days), None)}
        one = found[str(tmp_path / str(days) / "ca.crt")]
        assert one.kind == kind
        assert ("Make a new authority and hand its ca.crt to all devices" in one.text) == (kind != "ok")


def test_a_folder_that_this_user_may_not_list_is_not_called_empty(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "keys").mkdir(mode=0o700)
    monkeypatch.setattr(key_checks.Path, "iterdir", closed)
    monkeypatch.setattr(doctor, "_checks", lambda _: iter([key_checks.check_keys(tmp_path / "keys", None)]))
    (found,) = doctor.examine(None)
    assert (found.kind, "Permission denied" in found.text, "no .crt" in found.text) == ("FAULT", True, False)


def test_a_lost_authority_is_brought_back_and_not_made(tmp_path):
    """A new one would lock out all devices."""
    federation.prepare(tmp_path, [])
    for path in (tmp_path / "authority").iterdir():
        path.unlink()
    for _ in range(2):
        assert "or put the copy" in faults(tmp_path / "authority")[0]
        assert "A new authority locks out all devices" in faults(tmp_path / "authority")[0]
        if (tmp_path / "authority").exists():
            (tmp_path / "authority").rmdir()
    assert f"see what fedcross deploy federation {tmp_path} says" in faults(tmp_path / "gone")[0]
    assert faults(tmp_path / "none" / "authority") == [
        f"{tmp_path / 'none' / 'authority'}: no such folder. Make keys with fedcross deploy federation."
    ]


@pytest.mark.parametrize("name", ["superexec/superexec.key", "operator/token", "page/token"])
def test_a_lost_secret_of_the_server_is_missed(tmp_path, name):
    federation.prepare(tmp_path, [])
    path = tmp_path / name
    assert faults(path.parent) == []
    path.unlink()
    assert faults(path.parent)[0].startswith(f"{path}: missing. Make it with fedcross deploy federation")


def test_a_record_is_a_list(tmp_path):
    make_authority(tmp_path)
    (tmp_path / issued.FILE).write_text("{}")
    assert "no readable list of certificates" in faults(tmp_path)[0]


def test_an_empty_open_folder_is_closed_and_nothing_lost(tmp_path):
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca").chmod(0o755)
    with pytest.raises(StorageError, match="Close it before there are keys in it: chmod 700"):
        make_authority(tmp_path / "ca")


@pytest.mark.parametrize("name", ["server", "operator"])
def test_a_folder_whose_programs_need_ca_crt_lacks_it_whatever_authority_is_named(tmp_path, name):
    federation.prepare(tmp_path, [])
    (tmp_path / name / "ca.crt").unlink()
    for authority in (None, tmp_path / "authority" / "ca.crt"):
        (found,) = faults(tmp_path / name, authority)
        assert found.startswith(f"{tmp_path / name / 'ca.crt'}: missing")
        assert found.endswith(f"fedcross deploy federation {tmp_path} copies it there.")
    assert federation.prepare(tmp_path, []) == [str(tmp_path / name / "ca.crt")]
    assert faults(tmp_path / name) == []


def test_the_servers_folder_of_an_offline_authority_is_whole(tmp_path, capsys):
    """As docs/deploy.md, Rotating and revoking, makes it: what goes to the server has all that is read there."""
    ca, folder = tmp_path / "ca", tmp_path / "s2"
    assert main(["authority", str(ca)]) == main(["server", str(ca), str(folder), "localhost"]) == 0
    assert f"\n{folder / 'ca.crt'}\n" in capsys.readouterr().out
    assert (folder / "ca.crt").read_bytes() == (ca / "ca.crt").read_bytes()
    assert not [one for one in key_checks.check_keys(folder, None, [ca, folder]) if one.kind == "FAULT"]
    assert main(["server", str(ca), str(folder), "localhost"]) == 0
    assert "ca.crt" not in capsys.readouterr().out
    (folder / "ca.crt").unlink()
    for authority in (None, ca / "ca.crt"):
        (found,) = [one.text for one in key_checks.check_keys(folder, authority, [ca, folder]) if one.kind == "FAULT"]
        assert found.startswith(f"{folder / 'ca.crt'}: missing, and its programs need it. Copy the one that signed")
        assert found.endswith(f"cp AUTHORITY/ca.crt {folder}")


def test_an_authority_in_the_same_call_is_that_of_its_clients_certificates(tmp_path):
    root, folder = make_authority(tmp_path / "ca"), tmp_path / "devices"
    make_client(root, folder, "porch")
    other = make_authority(tmp_path / "other")
    asked = [tmp_path / "none", tmp_path / "other", tmp_path / "ca", folder]
    found = [*key_checks.check_keys(folder, None, asked)]
    assert kinds(found) == ["ok"] * len(found)
    assert any("porch.crt" in one.text and "days left" in one.text for one in found)
    (missing,) = [one.text for one in key_checks.check_keys(folder, None, [other.public.parent]) if one.kind == "FAULT"]
    assert missing == f"{folder / 'ca.crt'}: no such file. Name the authority's certificate with --authority."


def test_both_halves_of_a_pair_are_missed(tmp_path):
    federation.prepare(tmp_path, ["porch"])
    for name in ("server/server.crt", "server/server.key", "porch/porch-node.key", "porch/porch-node.pub"):
        (tmp_path / name).unlink()
    (found,) = faults(tmp_path / "server")
    assert found.startswith(f"{tmp_path / 'server' / 'server.crt'}, server.key: both are missing.")
    assert f"fedcross deploy federation {tmp_path} with --names" in found
    says = f"see what fedcross deploy federation {tmp_path} --device porch says."
    (found,) = faults(tmp_path / "porch")
    assert found == f"{tmp_path / 'porch'}: no *-node.key and no *-node.pub. Bring them back. If they are lost, {says}"
    shutil.rmtree(tmp_path / "porch")
    (found,) = faults(tmp_path / "porch")
    assert found.endswith(says)
    with pytest.raises(StorageError, match="this device had a key"):
        federation.prepare(tmp_path, ["porch"])
    assert not (tmp_path / "porch").exists()  # a refusal leaves no folder
    assert faults(tmp_path / "superexec") == faults(tmp_path / "public") == []


def test_a_bundle_without_a_pair_is_led_to_a_new_one(tmp_path):
    authority = make_authority(tmp_path / "ca").public
    bundle = new_client(Device("porch", "h:1", 0, 1), authority, tmp_path)
    for path in (bundle / "keys").glob("porch-node.*"):
        path.unlink()
    (found,) = faults(bundle / "keys")
    assert found.endswith(f"If they are lost, fedcross deploy rotate-key {bundle} makes a new pair.")


def test_an_authoritys_key_that_never_had_a_certificate(tmp_path):
    """The first call was cut off between the two files."""
    make_authority(tmp_path / "authority").public.unlink()
    (found,) = faults(tmp_path / "authority")
    assert "as the first call was cut off, remove ca.key and call that again" in found
    (tmp_path / "authority" / "ca.key").unlink()
    assert federation.prepare(tmp_path, [])


def test_an_older_list_of_revoked_certificates_is_a_fault(tmp_path):
    authority = make_authority(tmp_path / "ca")
    attic, porch = (make_client(authority, tmp_path / "d", name).public for name in ("attic", "porch"))
    crl, _ = revoke(authority, attic)
    copy = crl.read_bytes()
    revoke(authority, porch)
    crl.write_bytes(copy)
    (found,) = faults(tmp_path / "ca")
    assert found.startswith(f"{crl}: lacks 1 of the 2 that issued.json records as revoked")


def test_a_private_key_in_a_public_file_is_a_fault(tmp_path, capsys):
    authority = make_authority(tmp_path / "ca")
    text = authority.public.read_bytes()
    authority.public.write_bytes(text + authority.private.read_bytes())
    (found,) = faults(tmp_path / "ca")
    assert found.startswith(f"{authority.public}: a private key is in it, and others on this machine can read it")
    assert "If somebody may have read it, make a new authority" in found
    assert main(["check", str(authority.public), str(authority.public)]) == 2
    assert "a private key is in it" in capsys.readouterr().err
    authority.public.chmod(0o600)
    assert faults(tmp_path / "ca") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("authority/issued.json", "which is not there. Is its disk mounted?"),
        ("authority/ca.key", "which is not there. Bring it back"),
        ("authority/ca.crt", "which is not there. Is its disk mounted?"),
        ("server/server.crt", "which is not there. Is its disk mounted? Bring it back"),
        ("server/server.key", "which is not there. Bring it back"),
        ("server/gateway.token", "which is not there. Bring it back"),
    ],
)
def test_a_link_to_a_disk_that_is_away_is_a_finding(tmp_path, name, says):
    federation.prepare(tmp_path, ["a"])
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "away" / "file")
    told = [one.text for one in key_checks.check_keys(path.parent, None) if one.kind == "FAULT"]
    assert any(text.startswith(f"{path}: a link to {tmp_path}/away/file, {says}") for text in told)
