"""What ``fedcross doctor --device`` says on the device, beside a gateway that answers as ours does."""

import http.server
import os
import shutil
import ssl
import threading
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path

import pytest

from fedcross.core.causes import cause_of
from fedcross.core.errors import StorageError
from fedcross.core.private_files import write_public
from fedcross.core.trust.certificates import validity
from fedcross.core.trust.keys import make_node_key
from fedcross.core.trust.signing import make_authority, make_server
from fedcross.deploy import federation
from fedcross.deploy.actions import programs
from fedcross.deploy.device import Device, new_client
from fedcross.deploy.federation import SECRET, make_secret
from fedcross.engines.executor import entry
from fedcross.server.commands import device_checks, doctor
from tests.support.command import subcommand

deploy = subcommand("deploy")


def faults(findings):
    return [finding.text for finding in findings if finding.kind == "FAULT"]


def hangs(*_, **__):
    raise TimeoutError("timed out")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def keys(authority, tmp_path):
    make_node_key(tmp_path / "keys", "porch")
    write_public(tmp_path / "keys" / "ca.crt", authority.public.read_bytes())
    make_secret(tmp_path / "keys" / SECRET)
    return tmp_path / "keys"


class Gateway(http.server.BaseHTTPRequestHandler):
    """Refuses a call without signature; the class says with which status, and by how much its clock differs."""

    status, ahead, retry, body = 401, 0.0, None, ""

    def do_POST(self):
        known = (self.path, self.headers["Content-Type"]) == ("/v1/fleet/activate-node", "application/protobuf")
        self.send_response_only(self.status if known else 415)
        self.send_header("Date", formatdate(device_checks.time() + self.ahead, usegmt=True))
        if self.retry:
            self.send_header("Retry-After", self.retry)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def gateway(authority, tmp_path_factory):
    pair = make_server(authority, tmp_path_factory.mktemp("gateway") / "server", ["fl.example.org"])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.public, pair.private)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_device_in_order(keys, gateway):
    assert faults(device_checks.check_node_key(keys)) == []
    answered, clock = device_checks.check_server(gateway, keys / "ca.crt")
    assert (answered.kind, clock.kind) == ("ok", "ok")
    assert "with a certificate of this federation" in answered.text


def test_keys_that_are_open_or_missing(keys, tmp_path):
    (keys / "porch-node.key").chmod(0o644)
    (keys / "ca.crt").unlink()
    (keys / SECRET).unlink()
    no_secret, open_key, no_certificate = faults(device_checks.check_node_key(keys))
    assert "rotate-key --secret BUNDLE makes a new one" in no_secret
    assert "chmod 600" in open_key
    assert "ca.crt" in no_certificate
    make_node_key(keys, "other")
    assert "2 files *-node.key, a device has one" in faults(device_checks.check_node_key(keys))[0]
    assert "Name the folder 'keys'" in faults(device_checks.check_node_key(tmp_path / "none"))[0]


def test_keys_that_are_none_or_of_another_device(keys, tmp_path, authority):
    barn = make_node_key(tmp_path / "barn", "barn")
    (keys / "porch-node.pub").write_bytes(barn.public.read_bytes())
    (keys / SECRET).write_bytes(b"")
    foreign, empty = faults(device_checks.check_node_key(keys))
    assert "porch-node.key: this is not the key of" in foreign
    assert "0 bytes, a secret has 16 or more" in empty
    (keys / "porch-node.key").write_bytes(b"junk")
    (keys / "ca.crt").write_bytes(make_server(authority, tmp_path / "server", []).public.read_bytes())
    junk, _, no_authority = faults(device_checks.check_node_key(keys))
    assert "no unencrypted OpenSSH private key" in junk
    assert "not the certificate of an authority" in no_authority


def test_keys_of_another_user(keys, monkeypatch):
    def closed(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", closed)
    (said,) = faults(device_checks.check_node_key(keys))
    assert f"user {os.getuid()} may not look there" in said
    assert "DEVICE_USER" in said


def test_a_server_of_another_federation(gateway, tmp_path):
    other = make_authority(tmp_path / "other").public
    (refused,) = faults(device_checks.check_server(gateway, other))
    assert "its certificate is refused" in refused
    (unreadable,) = faults(device_checks.check_server(gateway, tmp_path / "none.crt"))
    assert "Copy the federation's ca.crt" in unreadable


def test_nobody_there_and_a_gateway_without_its_superlink(keys, gateway, monkeypatch):
    (nobody,) = faults(device_checks.check_server("127.0.0.1:1", keys / "ca.crt"))
    assert "Is the server up" in nobody
    monkeypatch.setattr(Gateway, "status", 503)
    (away,) = faults(device_checks.check_server(gateway, keys / "ca.crt"))
    assert "the gateway is up, but its SuperLink does not answer it (503)" in away
    assert cause_of(away).name == "superlink_away"
    monkeypatch.setattr(Gateway, "status", 404)
    (other,) = faults(device_checks.check_server(gateway, keys / "ca.crt"))
    assert cause_of(other).name == "foreign_server"


def test_a_registration_that_cannot_be_asked_for_is_no_fault(keys, gateway, tmp_path):
    (other,) = device_checks.check_registered(gateway, keys)
    assert (other.kind, "(401)" in other.text) == ("note", True)
    assert not list(device_checks.check_registered("127.0.0.1:1", keys))
    assert not list(device_checks.check_registered(gateway, tmp_path))


def test_a_gateway_whose_token_is_not_the_superlinks_is_no_fault_of_the_device(keys, gateway, monkeypatch):
    monkeypatch.setattr(Gateway, "body", entry.NOT_THE_GATEWAY)
    (found,) = faults(device_checks.check_registered(gateway, keys))
    assert found.startswith(f"{gateway}: the SuperLink does not answer this device: its key is not the reason.")
    assert found.endswith("two different gateway.token: at the server, restart both together.")
    assert found.index("Is this the SuperLink's own port (8000, usually)? Name the gateway's") < found.index(
        "two different"
    )


def test_a_folder_in_the_place_of_the_secret_is_one_fault(keys):
    secret = keys / "superexec.key"
    secret.unlink()
    secret.mkdir()
    (found,) = faults(device_checks.check_node_key(keys))
    assert f"{secret}: is a folder, not a file" in found
    assert f"rmdir {secret}" in found


def test_a_lost_ca_crt_is_one_fault(keys, gateway):
    (keys / "ca.crt").unlink()
    asked = doctor._parser().parse_args(["--device", str(keys), "--superlink", gateway, "--output", str(keys)])
    told = [one for one in faults(doctor.examine(asked)) if "ca.crt" in one]
    assert len(told) == 1


def test_a_gateway_that_has_no_room_and_one_that_hangs(keys, gateway, monkeypatch):
    monkeypatch.setattr(Gateway, "status", 503)
    monkeypatch.setattr(Gateway, "retry", "5")
    room, _ = device_checks.check_server(gateway, keys / "ca.crt")
    assert (room.kind, "no more room" in room.text) == ("note", True)
    monkeypatch.setattr(device_checks.HTTPSConnection, "request", hangs)
    (hanging,) = faults(device_checks.check_server(gateway, keys / "ca.crt"))
    assert "no answer within 5 s" in hanging
    assert cause_of(hanging).name == "superlink_away"


@pytest.mark.parametrize(
    ("ahead", "kind", "told"),
    [(250.0, "ok", "250 s behind"), (320.0, "FAULT", "behind the server's"), (-60.0, "FAULT", "ahead of the server's")],
)
def test_the_clock_is_compared_with_the_servers(ahead, kind, told):
    (found,) = device_checks.check_clock(formatdate(1e9 + ahead, usegmt=True), 1e9)
    assert found.kind == kind
    assert told in found.text


@pytest.mark.parametrize(("ahead", "started"), [(0, True), (1200, False), (-1200, False)])
def test_a_device_with_a_wrong_clock_says_so_and_does_not_start(keys, gateway, monkeypatch, capsys, ahead, started):
    """Flower's SuperNode would end with exit code 0 and no reason."""
    found = []
    monkeypatch.setattr(programs, "supernode", found.append)
    monkeypatch.setattr(Gateway, "ahead", -ahead)
    start = ["supernode", str(keys), "--name", "porch", "--partition", "0", "--partitions", "1", "--superlink"]
    if started:
        assert deploy([*start, gateway]) == 0
        assert deploy([*start, "127.0.0.1:1"]) == 0  # nobody there: the SuperNode waits for the server
        assert len(found) == 2
    else:
        assert deploy([*start, gateway]) == 1
        assert found == []
        assert "s ahead of the server's" in (said := capsys.readouterr().err) or "s behind the server's" in said
        assert "Set it, and turn on its synchronisation" in said


def test_the_clock_limits_are_flowers():
    from flwr.supercore import constant

    assert device_checks.AHEAD_S == -constant.MIN_TIMESTAMP_DIFF_SECONDS
    assert device_checks.BEHIND_S == constant.TIMESTAMP_TOLERANCE


@pytest.mark.parametrize("date", [None, "noon"])
def test_a_server_that_does_not_tell_the_time(date):
    assert [one.kind for one in device_checks.check_clock(date, 1e9)] == ["note"]


def test_the_call_it_makes_is_one_that_our_gateway_lets_through():
    assert device_checks.DOOR in (Path(__file__).parents[3] / "deploy" / "gateway.cfg").read_text()


def test_own_methods(monkeypatch, tmp_path):
    (tmp_path / "own" / "strategies").mkdir(parents=True)
    (tmp_path / "own" / "strategies" / "mine.py").touch()
    monkeypatch.setenv("FEDCROSS_PATH", f"{tmp_path / 'own'}:{tmp_path / 'away'}")
    found = list(device_checks.check_own_code())
    assert [one.kind for one in found] == ["ok", "FAULT"]
    assert "1 files" in found[0].text


def test_the_superlink_alone_is_wrong_use(capsys):
    with pytest.raises(SystemExit) as wrong:
        doctor.main(["--superlink", "fl.example.org:8443"])
    assert wrong.value.code == 2
    assert "--superlink needs --device FOLDER" in capsys.readouterr().err


def test_a_device_without_its_key_is_led_to_a_command_that_makes_one(keys, tmp_path, authority):
    bundle = new_client(Device("porch", "h:1", 0, 1), authority.public, tmp_path / "devices")
    key, public = (bundle / "keys" / f"porch-node.{ending}" for ending in ("key", "pub"))
    key.unlink()
    (found,) = faults(device_checks.check_node_key(bundle / "keys"))
    assert found.startswith(f"{public}: its private key porch-node.key is away.")
    assert f"fedcross deploy rotate-key {bundle} makes a new one" in found
    (bundle / "keys").rename(tmp_path / "device")  # as a container mounts it
    (mounted,) = faults(device_checks.check_node_key(tmp_path / "device"))
    assert "fedcross deploy rotate-key BUNDLE makes a new one and keeps this file" in mounted
    (tmp_path / "device").rename(bundle / "keys")
    public.unlink()
    (found,) = faults(device_checks.check_node_key(bundle / "keys"))
    assert f"fedcross deploy rotate-key {bundle} makes a new pair" in found
    shutil.rmtree(bundle / "keys")
    (found,) = faults(device_checks.check_node_key(bundle / "keys"))
    assert f"fedcross deploy rotate-key {bundle} makes it again" in found
    assert deploy(["rotate-key", str(bundle)]) == 0
    write_public(bundle / "keys" / "ca.crt", authority.public.read_bytes())  # as rotate-key says
    assert faults(device_checks.check_node_key(bundle / "keys")) == []


def test_a_federations_own_device_has_no_folder_called_keys(tmp_path):
    federation.prepare(tmp_path, ["porch"])
    folder = tmp_path / "porch"
    (folder / "porch-node.key").unlink()
    (found,) = faults(device_checks.check_node_key(folder))
    assert f"fedcross deploy rotate-key {folder} makes a new one" in found
    (folder / "porch-node.pub").unlink()
    (found,) = faults(device_checks.check_node_key(folder))
    assert "for a federation's own device, fedcross deploy federation with --device" in found


@pytest.mark.parametrize(("days", "kind"), [(92, "ok"), (80, "note"), (5, "FAULT")])
def test_a_device_says_when_it_needs_the_next_authority(keys, tmp_path, days, kind):
    (keys / "ca.crt").write_bytes(make_authority(tmp_path / "ca", days).public.read_bytes())
    *_, found = device_checks.check_node_key(keys)
    assert found.kind == kind
    assert ("Copy the new ca.crt from the server" in found.text) == (kind != "ok")


def test_an_expired_authority_on_a_device_is_not_rotated(tmp_path):
    copy = tmp_path / "ca.crt"
    copy.write_bytes(make_authority(tmp_path / "ca", 1).public.read_bytes())
    with pytest.raises(
        StorageError,
        match=r"expired on .* \(1 days ago by this clock\)\. Is this clock right\? If it is: Copy the new ca\.crt from",
    ):
        validity(copy, datetime.now(UTC) + timedelta(days=2))
