"""Tests of the gateway's files: what they promise, and their copies for a machine without containers.

tests/e2e/test_compose.py and tests/faults/attack_compose.py try the promises.
"""

import re
import socket
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedcross.core.causes import cause_of
from fedcross.core.errors import StorageError
from fedcross.deploy import gateway
from fedcross.deploy.federation import prepare
from fedcross.engines.executor import entry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def keys(tmp_path):
    prepare(tmp_path / "keys", [])
    return tmp_path / "keys" / "server"


@pytest.fixture
def haproxy(monkeypatch):
    monkeypatch.setattr(gateway, "_haproxy", lambda: "/usr/sbin/haproxy")


def test_its_files_name_places_of_this_machine_only(keys, tmp_path, haproxy):
    work = tmp_path / "gateway"
    command = gateway.prepare(keys, work, "127.0.0.1:8000", "192.0.2.7:8443")
    config = (work / "gateway.cfg").read_text()
    assert "\n    noreuseport\n" in config  # else a second gateway would take a share of the connections
    assert command[0] == "/usr/sbin/haproxy"
    assert command[-1] == str(work / "gateway.cfg")
    assert "bind 192.0.2.7:8443 ssl crt " + str(work / "server.pem") in config
    assert config.count("server superlink 127.0.0.1:8000 ") == 3
    assert config.count(f"ca-file {keys / 'ca.crt'} verifyhost superlink sni str(superlink)") == 3
    # Nothing of the container is left: not its folders, not the resolver, which would ask a DNS server for an address.
    assert not [
        place for place in ("/etc/fedcross", "/tmp/gateway.sock", "resolvers docker init-addr") if place in config
    ]
    assert f'SOCKET = "{work / "gateway.sock"}"' in (work / "deadline.lua").read_text()


def test_it_brings_its_token_to_the_superlink_whatever_a_device_has_sent(keys, tmp_path, haproxy):
    gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    lines = (tmp_path / "gateway" / "gateway.cfg").read_text().splitlines()
    token = (keys / "gateway.token").read_text()
    [said] = [line.strip() for line in lines if entry.GATEWAY in line]
    assert said == f'http-request set-header {entry.GATEWAY} "{token}"'  # set: all others of this name are deleted
    assert re.fullmatch(r"[A-Za-z0-9_-]{32,}", token)  # nothing that HAProxy would expand
    (keys / "gateway.token").chmod(0o644)
    with pytest.raises(StorageError, match=r"gateway\.token: mode 644"):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_the_container_starts_with_its_token_or_not_at_all(keys):
    start = ["sh", str(ROOT / "deploy" / "gateway.sh"), str(keys), "sh", "-c", "echo $FEDCROSS_GATEWAY"]
    assert subprocess.run(start, capture_output=True, text=True).stdout.strip() == (keys / "gateway.token").read_text()
    (keys / "gateway.token").unlink()
    refused = subprocess.run(start, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "fedcross deploy federation" in refused.stderr


@pytest.mark.parametrize("name", ["gateway.token", "server.key"])
def test_a_folder_that_docker_has_made_for_a_file_starts_no_gateway(keys, name):
    """With one for the token it started with none."""
    (keys / name).unlink()
    (keys / name).mkdir(mode=0o700)
    start = ["sh", str(ROOT / "deploy" / "gateway.sh"), str(keys), "echo", "started"]
    refused = subprocess.run(start, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"Remove it: rmdir {keys / name}." in refused.stderr


@pytest.mark.parametrize("sign", ['"', " ", "%", "$", "#", "'", "\\", "\n", "{", "é"])
def test_a_token_that_haproxy_reads_otherwise_starts_no_gateway(keys, tmp_path, haproxy, sign):
    """``%[env(HOME)]`` in it would be the gateway's home, and a quote would end the header."""
    (keys / "gateway.token").write_text(f"{'t' * 20}{sign}{'t' * 20}")
    with pytest.raises(StorageError, match=r"gateway\.token: (no token|this token cannot be read)"):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    start = ["sh", str(ROOT / "deploy" / "gateway.sh"), str(keys), "echo", "started"]
    refused = subprocess.run(start, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "fedcross deploy federation" in refused.stderr
    (keys / "gateway.token").write_text("AZaz09._~+/=-" * 3 + "\n")
    assert subprocess.run(start, capture_output=True, text=True).stdout == "started\n"
    gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_what_it_keeps_is_private(keys, tmp_path, haproxy):
    work = tmp_path / "gateway"
    gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:8443")
    assert work.stat().st_mode & 0o777 == 0o700
    pair = work / "server.pem"
    assert pair.stat().st_mode & 0o777 == 0o600
    assert pair.read_bytes() == (keys / "server.crt").read_bytes() + (keys / "server.key").read_bytes()


def test_a_second_gateway_leaves_the_first_ones_files_alone(keys, haproxy):
    with tempfile.TemporaryDirectory(prefix="fedcross-") as folder, socket.socket(socket.AF_UNIX) as first:
        work = Path(folder) / "g"  # a Unix socket's path is short
        gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:8443")
        before = (work / "gateway.cfg").read_bytes()
        first.bind(str(work / "gateway.sock"))
        gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:8443")  # one that was killed left it there
        first.listen()
        with pytest.raises(StorageError, match=r"a gateway runs with it \(fuser .*gateway.sock says which"):
            gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:9443")
        assert (work / "gateway.cfg").read_bytes() == before


def test_a_renewed_certificate_is_taken_up_at_the_next_start(keys, tmp_path, haproxy):
    for _ in range(2):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
        (keys / "server.crt").write_bytes((keys / "server.crt").read_bytes() + b"\n")
    assert not (tmp_path / "gateway" / "server.pem").read_bytes().startswith((keys / "server.crt").read_bytes())
    gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    assert (tmp_path / "gateway" / "server.pem").read_bytes().startswith((keys / "server.crt").read_bytes())


@pytest.mark.parametrize(
    ("place", "mode"), [("server.key", 0o644), ("server.key", 0o640), ("gateway.token", 0o644), (".", 0o755)]
)
def test_the_container_does_not_start_with_a_key_that_others_can_read(keys, place, mode):
    """HAProxy itself takes any; the image has no fedcross to look at it."""
    start = ["sh", str(ROOT / "deploy" / "gateway.sh"), str(keys), "echo", "started"]
    assert subprocess.run(start, capture_output=True, text=True).stdout == "started\n"
    (keys / place).chmod(mode)
    refused = subprocess.run(start, capture_output=True, text=True)
    (keys / place).chmod(0o700)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert cause_of(refused.stderr).name == "open_key"
    command = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith('CMD ["sh"'))
    assert '"/etc/fedcross/gateway.sh", "/keys/server", "haproxy"' in command


@pytest.mark.parametrize("odd", [" ", "\t", "\n", "#", "$", "'", '"', "\\", "\x7f"])
def test_paths_with_spaces_and_signs_are_refused_before_haproxy_misreads_them(keys, tmp_path, haproxy, odd):
    with pytest.raises(StorageError, match="no spaces") as caught:
        gateway.prepare(keys, tmp_path / f"my{odd}gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    assert f"(found: {odd!r})" in str(caught.value)
    moved = keys.rename(keys.with_name(f"{odd}keys"))
    with pytest.raises(StorageError, match=r"ca\.crt: HAProxy's configuration"):
        gateway.prepare(moved, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_without_haproxy_the_message_names_the_package(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(gateway.shutil, "which", lambda *_, **__: None)
    with pytest.raises(StorageError, match="Debian's package haproxy"):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")


def test_what_is_replaced_is_in_the_file(tmp_path):
    with pytest.raises(StorageError, match="does not name elsewhere"):
        gateway._changed(gateway.CONFIG, {"elsewhere": "here"})


def section(name):
    """Return the lines of a section of the gateway's configuration, without comments, in their order."""
    text = (files("fedcross.deploy") / gateway.CONFIG).read_text()
    parts = re.split(r"^(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    (part,) = [part for part in parts if part.split("\n", 1)[0] == name]
    return [line.strip() for line in part.split("\n")[1:] if line.strip()]


def number(pattern, text):
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return int(found)


def test_every_body_has_a_deadline_and_a_small_one_takes_no_slot_before_it_is_there():
    lines = section("frontend fleet")
    waits = ["http-request wait-for-body time 10s if small"]
    waits.append("http-request wait-for-body time 10s at-least 16384 if !small")
    assert [line for line in lines if "wait-for-body" in line] == waits
    assert "acl small req.hdr_val(content-length) le 16384" in lines
    assert lines.index(waits[1]) < min(i for i, line in enumerate(lines) if "backend" in line)
    assert "timeout http-request 10s" in section("defaults")
    assert number(r"^tune.bufsize (\d+)$", "\n".join(section("global"))) >= 2 * 16384


def test_no_request_takes_longer_than_two_minutes_however_it_trickles():
    """HAProxy's own timeouts begin anew with each byte: a script looks at all sessions and ends the old ones."""
    script = (files("fedcross.deploy") / gateway.DEADLINE).read_text()
    first, last = "lua-load /etc/fedcross/deadline.lua", "stats socket /tmp/gateway.sock mode 600 level admin"
    assert {first, last} <= set(section("global"))
    deadline, every = map(int, re.findall(r"DEADLINE_S, EVERY_S = (\d+), (\d+)", script)[0])
    assert deadline + every < 130
    assert 40_000 < 5 * 2**20 / deadline < 50_000  # bytes a second: the least that a full piece needs
    assert "core.register_task(function()" in script
    assert "fe=fleet" in script  # the frontend's name
    assert re.search(r"if id and age\(took\) > DEADLINE_S then\s+ask\(\"shutdown session \" \.\. id\)", script)


def test_connections_of_one_address_are_refused_before_the_tls_handshake():
    lines = section("frontend fleet")
    track = lines.index("tcp-request connection track-sc0 src,ipmask(32,64)")
    rejects = [line for line in lines[track:] if line.startswith("tcp-request connection reject if ")]
    assert [line.split(" if ")[1] for line in rejects] == [
        "{ sc0_conn_cur gt 256 }",
        "!accepted_here above_32 or refused_here above_32",
        "!accepted_here hasty unlucky or refused_here hasty unlucky",
        # One key can make many addresses known, with 256 connections each: they leave 500 to those who are not known.
        "{ fe_conn gt 1000 } above_32",
        "{ fe_conn gt 1000 } !accepted_here above_4 or { fe_conn gt 1000 } refused_here above_4",
        "last_500 !accepted_here or last_500 refused_here",
    ]
    assert {
        "acl last_500 fe_conn gt 1500",
        "acl above_4 sc0_conn_cur gt 4",
        "acl above_32 sc0_conn_cur gt 32",
        "acl hasty sc0_conn_rate gt 200",
        "acl unlucky rand(10) gt 0",
    } <= set(lines)
    assert number(r"^maxconn (\d+)$", "\n".join(section("global"))) == 2000
    (table,) = [line for line in lines if line.startswith("stick-table")]
    assert {"conn_cur", "conn_rate(10s)", "gpc0_rate(5m)", "gpt0"} <= set(table.split("store ")[1].split(","))


def test_only_who_has_authenticated_is_known_and_strangers_have_a_few_slots_of_their_own():
    lines = section("frontend fleet")
    assert "http-request deny deny_status 503 if !known !small" in lines
    choices = [line for line in lines if "_backend " in line]
    assert choices[0] == "use_backend newcomers if !known"
    assert "http-request deny deny_status 503 if { sc1_conn_cur(transferring) gt 12 }" in lines
    assert "http-request track-sc1 var(txn.key) table transferring if known !small or known transfer" in lines
    # What nobody signed takes none of them.
    refused = lines.index('http-request return status 401 hdr Date "%[date,http_date]" if !signed')
    assert lines[refused - 1] == "http-request deny deny_status 503 if !signed { nbsrv(calls) eq 0 }"
    assert refused < min(i for i, line in enumerate(lines) if "wait-for-body" in line)


def test_nobody_can_send_many_requests_over_one_connection_at_once():
    """In HTTP/2 all limits of connections would count one for any number of slow bodies."""
    assert "option disable-h2-upgrade" in section("defaults")
    (bind,) = [line for line in section("frontend fleet") if line.startswith("bind ")]
    assert bind.endswith(" alpn http/1.1")


def test_small_calls_of_one_address_have_a_share_and_wait_for_nobody_elses():
    lines = section("frontend fleet")
    track = lines.index("http-request track-sc1 var(txn.address) table calling if call")
    # Whatever is no transfer is a call, and only what is whole takes a place; strangers have places of their own.
    assert lines[track - 2 : track + 2] == [
        "http-request set-var(txn.call) bool(true) if known small !transfer", "acl call var(txn.call) -m bool",
        lines[track], "http-request track-sc1 var(txn.address) table strangers if !known",
    ]  # fmt: skip
    assert track > max(i for i, line in enumerate(lines) if "wait-for-body" in line)
    beyond = "if call beyond or !known beyond_four"
    assert f"http-request return status 503 hdr Retry-After 5 {beyond}" in lines[track:]
    limits = {"beyond": "calling", "beyond_four": "strangers"}
    patterns = (rf"^acl {name} sc1_conn_cur\({table}\) gt (\d+)$" for name, table in limits.items())
    share, strangers = (number(pattern, "\n".join(lines)) for pattern in patterns)
    slots = number(r"server superlink .* maxconn (\d+)", "\n".join(section("backend calls")))
    newcomers = number(r"server superlink .* maxconn (\d+)", "\n".join(section("backend newcomers")))
    assert share <= slots / 3
    assert strangers <= newcomers / 2
    # The log says once a minute which address it was.
    assert f"http-request sc-inc-gpc0(1) {beyond}" in lines[track:]
    script = (files("fedcross.deploy") / gateway.DEADLINE).read_text()
    for table in limits.values():
        assert section(f"backend {table}") == ["stick-table type ipv6 size 100k expire 10m store conn_cur,gpc0"]
        assert re.search(rf"in pairs\(\{{.*\b{table} = ", script)
    assert 'ask("show table " .. name .. " data.gpc0 gt 0")' in script
    assert number(r"^local TELL_S = (\d+)$", script) == 60


def test_a_device_is_known_by_its_key_and_its_own_calls_alone_change_that():
    """Neither connections nor refused calls renew an entry: what counts are the accepted ones of the last minutes."""
    lines = section("frontend fleet")
    assert [line for line in lines if "-sc2" in line or "0(0)" in line or "0(2)" in line] == [
        "http-request track-sc2 var(txn.device) table devices if known",
        "http-request track-sc2 var(txn.address) table unsigned if !signed",
        "http-response track-sc2 var(txn.device) table devices if { status 200 }",
        "http-response sc-inc-gpc0(2) if { status 200 }",
        "http-response sc-inc-gpc0(0) if { status 200 }",
        "http-response sc-set-gpt0(2) 0 if { status 200 }",
        "http-response sc-set-gpt0(0) 0 if { status 200 }",
        "http-response sc-set-gpt0(2) 1 if known { status 401 }",
        "http-response sc-set-gpt0(0) 1 if known { status 401 }",
    ]
    assert "http-request set-var(txn.known) bool(true) if signed accepted !refused" in lines
    names = {
        "one_key": FLEET_HTTP_PUBLIC_KEY_HEADER,
        "signature": FLEET_HTTP_SIGNATURE_HEADER,
        "time": TIMESTAMP_HEADER,
    }
    assert {f"acl {acl} req.fhdr_cnt({name}) eq 1" for acl, name in names.items()} <= set(lines)
    digest = f"req.fhdr({FLEET_HTTP_PUBLIC_KEY_HEADER},1),b64dec,digest(sha-256),hex"
    key = lines.index(f"http-request set-var(txn.key) {digest} if signed")
    assert lines[key + 1] == "http-request set-var(txn.device) var(txn.key),concat(@,txn.address) if signed"
    (table,) = section("backend devices")
    assert number(r" len (\d+) ", table) >= len("0" * 64 + "@" + "ffff:" * 8)
    assert "expire 10m" in table
    assert "gpc0_rate(5m)" in table


def test_a_query_another_type_and_large_headers_do_not_reach_the_superlinks_log():
    lines = section("frontend fleet")
    denied = [
        "http-request deny deny_status 400 if { url -m sub ? }",
        "http-request return status 431 if { req.hdrs,length gt 4096 }",
        f"http-request return status 415 if !{{ req.hdr(content-type) -m str {PROTOBUF_MEDIA_TYPE} }}",
    ]
    assert [line for line in lines if line in denied] == denied
    assert lines.index(denied[-1]) < lines.index("http-request wait-for-body time 10s if small")


def test_nothing_is_written_where_haproxy_is_missing(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(gateway.shutil, "which", lambda *_, **__: None)
    with pytest.raises(StorageError, match="haproxy: not found"):
        gateway.prepare(keys, tmp_path / "gateway", "127.0.0.1:8000", "0.0.0.0:8443")
    assert not (tmp_path / "gateway").exists()


@pytest.mark.parametrize("folder", ["server", "public", "page"])
def test_its_files_do_not_lie_among_keys(keys, haproxy, folder):
    work = keys.parent / folder
    before = sorted(work.iterdir())
    with pytest.raises(StorageError, match=rf"--work {work}: a folder of keys, with ca\.crt\. Name another"):
        gateway.prepare(keys, work, "127.0.0.1:8000", "0.0.0.0:8443")
    assert sorted(work.iterdir()) == before
