"""What an attacker's container on the clients' network does (for :mod:`tests.faults.attack_compose`).

::

    python -m tests.support.attacker slow|idle|garbage HOST:PORT CA SECONDS COUNT SEED
    python -m tests.support.attacker node HOST:PORT CA KEY PARTITION

The first three need no credentials; they are bounded in number and time and print one line of JSON. ``node`` has a
registered key: it activates itself under a partition (another's, say), polls as a SuperNode does, and for each line of
JSON on its standard input answers a request to *another* node, in that node's name.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FLEET = "/v1/fleet/"
PATHS = ("push-messages", "push-object", "pull-messages", "activate-node", "send-node-heartbeat", "get-run")
#: Size of the bomb in pieces of 5 MiB, all the same, so that one travels: 2,200 MiB.
PIECE, PIECES = 5 * 2**20, 440


def connect(address: str, authority: str) -> ssl.SSLSocket:
    """Return a TLS connection."""
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context(cafile=authority)
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=5), server_hostname=host)


def slow(address: str, authority: str, seconds: float, count: int, seed: int) -> Counter[str]:
    """Keep `count` POSTs open whose bodies trickle, one byte a second, and open each again that is cut off."""
    told: Counter[str] = Counter()
    head = f"POST {FLEET}push-messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\n"
    head += "flwr-public-key: AAAA\r\nflwr-signature: AAAA\r\nflwr-timestamp: x\r\n"  # else the gateway answers at once
    head += f"content-length: {2**20 if seed % 2 else 9000}\r\n\r\n"
    links: list[ssl.SSLSocket] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(min(count - len(links), 40)):
            try:
                link = connect(address, authority)
                link.sendall(head.encode() + b"x")
                links.append(link)
                told["opened"] += 1
            except OSError:
                told["refused"] += 1
        time.sleep(1)
        for link in list(links):
            try:
                link.sendall(b"x")
                link.settimeout(0.001)
                with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                    answer = link.recv(100)
                    raise ConnectionError(answer[9:12].decode() or "closed")
            except OSError:
                told["cut"] += 1
                links.remove(link)
                link.close()
        told["most"] = max(told["most"], len(links))
    return told


def idle(address: str, authority: str, seconds: float, count: int, seed: int) -> Counter[str]:
    """Open `count` TCP connections and say nothing."""
    host, port = address.rsplit(":", 1)
    told: Counter[str] = Counter()
    links = []
    for _ in range(count):
        try:
            links.append(socket.create_connection((host, int(port)), timeout=2))
            told["opened"] += 1
        except OSError:
            told["refused"] += 1
    time.sleep(1)
    for link in links:
        link.settimeout(0.001)
        try:
            link.recv(1)
            told["closed"] += 1
        except TimeoutError:
            told["held"] += 1
        except OSError:
            told["closed"] += 1
    print(json.dumps(told), flush=True)
    time.sleep(seconds)
    return told


def garbage(address: str, authority: str, seconds: float, count: int, seed: int) -> Counter[str]:
    """Send `count` pieces of noise: on the socket, within TLS, and as bodies of calls that SuperNodes make."""
    told: Counter[str] = Counter()
    draw = random.Random(seed)
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context(cafile=authority)
    end = time.monotonic() + seconds
    for _ in range(count):
        if time.monotonic() > end:
            break
        noise = draw.randbytes(draw.choice((1, 100, 5000, 200_000)))
        kind = draw.choice(("socket", "tls", "call", "call", "signed"))
        try:
            if kind == "socket":
                with socket.create_connection((host, int(port)), timeout=5) as link:
                    link.sendall(noise)
            elif kind == "tls":
                with connect(address, authority) as secure:
                    secure.sendall(noise)
            else:
                connection = http.client.HTTPSConnection(address, context=context, timeout=10)
                signed = {f"flwr-{name}": draw.randbytes(60).hex() for name in ("public-key", "signature", "timestamp")}
                headers = {"content-type": "application/protobuf", **(signed if kind == "signed" else {})}
                connection.request("POST", FLEET + draw.choice(PATHS), noise, headers)
                told[str(connection.getresponse().status)] += 1
                connection.close()
            told[kind] += 1
        except (OSError, http.client.HTTPException):
            told[f"{kind} cut"] += 1
        time.sleep(0.1)
    return told


def forged(asked: dict[str, Any], seed: int) -> Any:
    """Return a reply to the request `asked` (the SuperLink's row of it, with a ``kind``) in its addressee's name."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = asked["run_id"], asked["dst_node_id"], 1
    request = Message(RecordDict(), dst_node_id=asked["dst_node_id"], message_type=asked["message_type"])
    names = ("run_id", "message_id", "src_node_id", "dst_node_id", "group_id", "created_at", "ttl")
    request.metadata.__dict__.update({f"_{name}": asked[name] for name in names})
    if asked["kind"] == "spoofed error":
        reply = Message(Error(2, "ConfigError: spoofed"), reply_to=request)
    else:
        if asked["kind"] == "bomb":
            chunk = ArrayChunk(memoryview(bytes(PIECE)))
            array = Array("float32", (PIECE * PIECES // 4,), "numpy.ndarray", b"")
            array.__dict__["_chunks"] = [(chunk.object_id, chunk)] * PIECES
        else:
            array = Array(np.random.default_rng(seed).integers(0, 255, 5000, np.uint8))
        record = RecordDict({"arrays": ArrayRecord({"packed": array}), "config": ConfigRecord({"nonce": "0" * 32})})
        record["metrics"] = MetricRecord({"num-examples": 2**40})
        reply = Message(record, reply_to=request)
    reply.metadata.__dict__["_src_node_id"] = asked["dst_node_id"]
    return reply


def node(address: str, authority: str, key: str, partition: str) -> None:
    """Be a registered node that claims `partition`, and forge what standard input asks for; say what became of it."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    from tests.support.light_node import Connection

    private = load_ssh_private_key(Path(key).read_bytes(), None)
    pair = (private, private.public_key())
    with http_request_response(address, False, Path(authority).read_bytes(), pair) as functions:  # type: ignore[arg-type]
        own = Connection(functions, int(partition))
        print(json.dumps({"node": own.node}), flush=True)

        def poll() -> None:
            while True:
                with contextlib.suppress(Exception):
                    if (message := own.next()) is not None:
                        own.send(own.answer(message))
                        continue
                time.sleep(3)

        threading.Thread(target=poll, daemon=True).start()
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            try:
                own.send(forged(asked, number))
                told = "sent"
            except Exception as error:  # noqa: BLE001 - refusals come in many kinds; all are told
                told = f"{type(error).__name__}: {error}"[:200]
            print(json.dumps({"kind": asked["kind"], "told": told}), flush=True)


def main() -> None:
    """Do what the command line says."""
    kind, *arguments = sys.argv[1:]
    if kind == "node":
        node(*arguments)
        return
    address, authority, seconds, count, seed = arguments
    act = {"slow": slow, "idle": idle, "garbage": garbage}[kind]
    print(json.dumps(act(address, authority, float(seconds), int(count), int(seed))), flush=True)


if __name__ == "__main__":
    main()
