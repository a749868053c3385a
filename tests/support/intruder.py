"""What somebody on a client's network may try. Most functions return Python code for a client's container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.trust import signing

if TYPE_CHECKING:
    from tests.support.containers import Federation


def superlink_paths() -> list[str]:
    """Return every path that Flower's SuperLink serves, from its own description."""
    code = (
        "from flwr.superlink.main import create_app\n"
        "print(*create_app().openapi()['paths'], '/docs', '/openapi.json', '/', sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("/"))


def asks(address: str, paths: Sequence[str], authority: str) -> str:
    """Code that POSTs (and GETs, where that is not refused less) each path and prints the statuses as JSON."""
    return f"""
import http.client, json, ssl, time
context = ssl.create_default_context(cafile={authority!r})
def status(method, path):
    try:
        return once(method, path)
    except ConnectionResetError:  # a stranger who asks 300 times in 10 s loses its connections
        time.sleep(11)
        return once(method, path)
def once(method, path):
    connection = http.client.HTTPSConnection({address!r}, context=context, timeout=20)
    connection.request(method, path, body=b"" if method == "POST" else None,
                       headers={{"content-type": "application/protobuf"}} if method == "POST" else {{}})
    return connection.getresponse().status
found = {{}}
for path in {list(paths)!r}:
    post = status("POST", path)
    if post == 403:
        assert status("GET", path) == 403, path
        for trick in ("/v1/fleet/.." + path.removeprefix("/v1"), "/v1/fleet/%2e%2e" + path, "/" + path, path + "/"):
            assert status("POST", trick) == 403, trick
    else:
        assert status("GET", path) == 405, path
    found[path] = post
print(json.dumps(found))
"""


def connects(hosts: Sequence[str], port: int) -> str:
    """Code that tries to reach hosts that must not be reachable."""
    return f"""
import socket
def reached(host):
    try:
        socket.create_connection((host, {port}), timeout=4).close()
    except OSError:
        return "refused"
    return "REACHED"
print(*map(reached, {list(hosts)!r}))
"""


def plaintext(address: str) -> str:
    """Code that speaks HTTP without TLS."""
    host, port = address.split(":")
    return f"""
import socket
link = socket.create_connection(({host!r}, {port}), timeout=10)
link.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n")
try:
    answer = link.recv(100)
except ConnectionResetError:
    answer = b""
print("ANSWERED" if answer.startswith(b"HTTP") else "no answer to plain HTTP")
"""


def supernode(address: str, authority: str, server: str = "") -> str:
    """Code that starts a SuperNode with a key that nobody registered, and prints what it says as it gives up.

    Parameters
    ----------
    address : str
        Whom it calls.
    authority : str
        The certificate that it trusts, PEM.
    server : str
        Certificate and key, PEM, of a server that listens on `address` in the same container; none if empty.
    """
    return f"""
import os, pathlib, signal, socket, ssl, subprocess, tempfile, threading
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "ca.crt").write_text({authority!r})
def serve(listener, context):
    while True:
        try:
            context.wrap_socket(listener.accept()[0], server_side=True).close()
        except OSError:
            pass
if {server!r}:
    (folder / "server.pem").write_text({server!r})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    listener = socket.create_server(("127.0.0.1", {address.rsplit(":", 1)[1]}))
    threading.Thread(target=serve, args=(listener, context), daemon=True).start()
subprocess.run(["fedcross", "deploy", "node", folder / "keys", "stranger"], check=True, capture_output=True)
with (folder / "log").open("wb") as log:
    process = subprocess.Popen(
        ["flower-supernode", "--superlink", {address!r}, "--root-certificates", folder / "ca.crt", "--port", "9999",
         "--auth-supernode-private-key", folder / "keys" / "stranger-node.key"],
        stdout=log, stderr=log, start_new_session=True)
    try:
        assert process.wait(120) != 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its SuperExec outlives it
print((folder / "log").read_text())
"""


def expired(folder: Path) -> tuple[str, str]:
    """Return an authority's certificate and, signed by it, a server's that has run out, with its key (PEM)."""
    authority = signing.make_authority(folder)
    early = datetime.now(UTC) - timedelta(days=2)
    pair = signing.make_server(authority, folder, [], days=1, now=early)
    return authority.public.read_text(), pair.public.read_text() + pair.private.read_text()


def large_body(address: str, authority: str, size: int, how: str) -> str:
    """Code that sends a body of `size` bytes without credentials and prints the status.

    `how` is ``announced`` (its length in the header) or ``chunked``.
    """
    host, port = address.split(":")
    head = f"content-length: {size}" if how == "announced" else "transfer-encoding: chunked"
    head += "\\r\\ncontent-type: application/protobuf"
    piece = "b'x' * 2**20" if how == "announced" else "b'100000\\r\\n' + b'x' * 2**20 + b'\\r\\n'"
    return f"""
import socket, ssl
context = ssl.create_default_context(cafile={authority!r})
link = context.wrap_socket(socket.create_connection(({host!r}, {port}), timeout=30), server_hostname={host!r})
link.sendall(b"POST /v1/fleet/push-object HTTP/1.1\\r\\nhost: x\\r\\n{head}\\r\\n\\r\\n")
piece = {piece}
sent = 0
try:
    while sent < {size}:
        link.sendall(piece)
        sent += 2**20
except OSError:
    pass
answer = b""
try:
    answer = link.recv(4096)
except OSError:
    pass
print(answer.split(b" ")[1].decode() if answer.startswith(b"HTTP") else "cut")
"""


def flood(address: str, authority: str, per_second: int, seconds: int) -> str:
    """Code that makes unsigned calls over four connections, and prints how many got which answer.

    `authority` is the certificate that it trusts, PEM: another user of a device cannot read the device's own.
    """
    host, port = address.split(":")
    return f"""
import collections, json, socket, ssl, threading, time
context = ssl.create_default_context(cadata={authority!r})
head = b"POST /v1/fleet/pull-messages HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/protobuf\\r\\n"
head += b"content-length: 0\\r\\n\\r\\n"
told, end = collections.Counter(), time.monotonic() + {seconds}
def work():
    link = None
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            if link is None:
                link = context.wrap_socket(socket.create_connection(({host!r}, {port}), 30), server_hostname={host!r})
            link.sendall(head)
            told[link.recv(2**16)[9:12].decode() or "closed"] += 1
        except OSError:
            told["closed"] += 1
            link = None
        time.sleep(max(0, 4 / {per_second} - (time.monotonic() - began)))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(told))
"""


def calls(address: str, authority: str, count: int) -> str:
    """Code that makes `count` small calls, each with a TLS handshake of its own, and prints the seconds of each.

    A key that nobody registered signs them, wrongly: the SuperLink itself refuses them.
    """
    return f"""
import base64, http.client, json, ssl, time
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
context = ssl.create_default_context(cafile={authority!r})
key = base64.b64encode(public_key_to_bytes(generate_key_pairs()[1])).decode()
headers = {{"flwr-public-key": key, "flwr-signature": "AAAA", "flwr-timestamp": "2026-01-01T00:00:00+00:00"}}
took = []
for _ in range({count}):
    began = time.monotonic()
    connection = http.client.HTTPSConnection({address!r}, context=context, timeout=60)
    own = {{"content-type": "application/protobuf", **headers}}
    connection.request("POST", "/v1/fleet/pull-messages", b"x" * 100, own)
    assert connection.getresponse().status == 401
    connection.close()
    took.append(round(time.monotonic() - began, 2))
print(json.dumps(took))
"""


#: Code that asks the SuperNode of its own machine for a task, without the secret, and prints what it says.
ACQUIRE = """
import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
client = RuntimeHttpClient.from_server_address(
    server_address="127.0.0.1:9094", insecure=True, root_certificates=None,
    interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")])
try:
    print("ANSWERED:", client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"])))
except httpx.HTTPStatusError as error:
    print("refused:", error.response.status_code, error.response.text[:200])
"""


def peak_rss(federation: Federation) -> int:
    """Return the most memory in bytes that the SuperLink's process held since the last call, and begin anew."""
    code = (
        "import re, pathlib\n"
        "for entry in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if b'flower-superlink' in (entry / 'cmdline').read_bytes() and int(entry.name) != 1:\n"
        "        print(re.search(r'VmHWM:\\s*(\\d+)', (entry / 'status').read_text())[1])\n"
        "        (entry / 'clear_refs').write_text('5')\n"
    )
    return max(int(line) for line in federation.python("superlink", code).split()) * 1024
