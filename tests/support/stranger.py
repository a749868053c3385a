"""What a stranger does to a gateway, without credentials; prints one JSON object. Runs alone in a container.

::

    python stranger.py KIND HOST:PORT CA SECONDS
"""

import base64
import contextlib
import http.client
import json
import secrets
import socket
import ssl
import sys
import threading
import time
from collections import Counter

CALL = "/v1/fleet/pull-messages"
PATHS = (
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task",
    "/v1/runtime/push-object", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/health", "/docs", "/metrics",
)  # fmt: skip


def signed():
    """Return the headers of a call with a key of its own, which nobody has registered."""
    key = base64.b64encode(secrets.token_bytes(90)).decode()
    return {"content-type": "application/protobuf", "flwr-public-key": key, "flwr-signature": "AAAA"}


def attack(kind, address, authority, seconds):
    """Attack for so many seconds; return how often what happened."""
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context(cafile=authority)
    told, end = Counter(), time.monotonic() + seconds

    def bare():
        return socket.create_connection((host, int(port)), timeout=5)

    def ask(path, body=b"", **headers):
        headers = {**signed(), **{name.replace("_", "-"): value for name, value in headers.items()}}
        link = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
        with contextlib.closing(link):
            link.request("POST", path, body, headers)
            return str(link.getresponse().status)

    def flood():
        while time.monotonic() < end:
            try:
                told[ask(CALL)] += 1
            except OSError:
                told["closed"] += 1

    def slow():
        head = f"POST {CALL.replace('pull-messages', 'push-object')} HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in signed().items()) + "\r\n"
        while time.monotonic() < end:
            with contextlib.suppress(OSError), context.wrap_socket(bare(), server_hostname=host) as link:
                link.sendall(head.encode())
                told["opened"] += 1
                while time.monotonic() < end:
                    link.sendall(b"x")
                    time.sleep(1)
            time.sleep(0.2)

    if kind == "paths":
        told.update(ask(path) for path in PATHS)
    elif kind == "large":
        for length in ({"content_length": str(600 << 20)}, {"transfer_encoding": "chunked"}):
            told[ask("/v1/fleet/push-object", **length)] += 1
    elif kind == "idle":
        links = []
        while time.monotonic() < end:
            for _ in range(500 - len(links)):
                with contextlib.suppress(OSError):
                    links.append(bare())
                    told["opened"] += 1
            time.sleep(1)
            for link in list(links):
                link.settimeout(0.001)
                try:
                    link.recv(1)
                except TimeoutError:
                    continue
                except OSError:
                    pass
                told["closed"] += 1
                links.remove(link)
                link.close()
            told["most"] = max(told["most"], len(links))
    else:
        threads = [threading.Thread(target={"flood": flood, "slow": slow}[kind]) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return told


if __name__ == "__main__":
    what, where, trusted, duration = sys.argv[1:]
    print(json.dumps(attack(what, where, trusted, float(duration))))
