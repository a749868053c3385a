"""A TCP proxy with bad weather: latency, resets, a partition, and a count of the bytes.

::

    python -m tests.support.proxy LISTEN_PORT TARGET_PORT [--latency 0.05] [--partition AFTER SECONDS]

carries connections to 127.0.0.1:LISTEN_PORT on to 127.0.0.1:TARGET_PORT. While partitioned nothing passes in either
direction and new connections are not answered, as with a cable that is out: neither side is told. Latency is added to
each direction. What it passes on it does not understand, so TLS goes through as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import selectors
import socket
import threading
import time
from collections import deque

CHUNK = 1 << 16
#: Connections that the kernel completes before they are accepted; one more is not answered at all.
BACKLOG = 16


class Proxy:
    """Forwards TCP connections to `target` on loopback, one thread for all of them; a context manager.

    Parameters
    ----------
    target : int
        Port to connect to; it may be closed for a while.
    port : int
        Port to listen on; 0 for a free one.
    latency : float
        Seconds by which every piece of data is held back.
    """

    def __init__(self, target: int, port: int = 0, latency: float = 0.0) -> None:
        self.target, self.latency = target, latency
        self._listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        #: Bytes towards the target and back.
        self.up = self.down = 0
        self.connections = 0
        self._partitioned = threading.Event()
        self._reset = threading.Event()
        self._over = threading.Event()
        self._links: list[_Link] = []
        self._plugs: list[socket.socket] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def partition(self) -> None:
        """Let nothing through from now on."""
        self._partitioned.set()

    def heal(self) -> None:
        """Let everything through again; what was held back goes on its way."""
        self._partitioned.clear()

    def reset(self) -> None:
        """Reset (RST) all connections once."""
        self._reset.set()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(self._listener.close)
            selector.register(self._listener, selectors.EVENT_READ, None)
            stack.callback(lambda: [link.close() for link in self._links])
            stack.callback(lambda: [plug.close() for plug in self._plugs])
            while not self._over.is_set():
                self._turn(selector)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        if self._reset.is_set():
            self._reset.clear()
            for link in self._links:
                link.close(reset=True)
        for link in [one for one in self._links if one.closed]:
            for side in link.sides:
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(side)
            link.close()
            self._links.remove(link)
        if self._partitioned.is_set():
            if not self._plugs:
                self._plug(selector)
            time.sleep(0.01)  # the kernel's buffers fill up, and then the senders wait
            return
        if self._plugs:
            self._unplug()
        for key, _ in selector.select(0.005):
            if key.fileobj is self._listener:
                self._accept(selector)
            else:
                key.data.read(key.fileobj)
        now = time.monotonic()
        for link in self._links:
            link.deliver(now)

    def _plug(self, selector: selectors.BaseSelector) -> None:
        """Fill the kernel's queue, so that it drops the first packet of every further connection."""
        while select.select([self._listener], [], [], 0)[0]:
            self._accept(selector)
        for _ in range(BACKLOG + 1):
            plug = socket.socket()
            plug.setblocking(False)
            plug.connect_ex(self._listener.getsockname())
            self._plugs.append(plug)

    def _unplug(self) -> None:
        own = {plug.getsockname() for plug in self._plugs}
        while own and select.select([self._listener], [], [], 0)[0]:
            connection, address = self._listener.accept()
            connection.close()
            own.discard(address)
        for plug in self._plugs:
            plug.close()
        self._plugs = []

    def _accept(self, selector: selectors.BaseSelector) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=60)
        except OSError:
            client.close()
            return
        link = _Link(self, client, server)
        self._links.append(link)
        for side in link.sides:
            side.setblocking(False)
            selector.register(side, selectors.EVENT_READ, link)


class _Link:
    """One connection: two sockets and what is on its way between them."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.sides = (client, server)
        self.closed = False
        self._queues: dict[socket.socket, deque[tuple[float, bytes]]] = {client: deque(), server: deque()}

    def read(self, source: object) -> None:
        """Take in what has come; an end of stream ends the link once everything is delivered."""
        side = self.client if source is self.client else self.server
        other = self.server if side is self.client else self.client
        try:
            data = side.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._queues[other].append((time.monotonic() + self.proxy.latency, data))
        if side is self.client:
            self.proxy.up += len(data)
        else:
            self.proxy.down += len(data)

    def deliver(self, now: float) -> None:
        """Send on what is due."""
        for side, queue in self._queues.items():
            while queue and queue[0][0] <= now and not self.closed:
                due, data = queue.popleft()
                if not data:
                    self.closed = True
                    break
                try:
                    sent = side.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self.closed = True
                    break
                if sent < len(data):
                    queue.appendleft((due, data[sent:]))
                    break

    def close(self, *, reset: bool = False) -> None:
        """Close both ends, with RST if `reset`."""
        self.closed = True
        for side in self.sides:
            if reset:
                with contextlib.suppress(OSError):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with contextlib.suppress(OSError):
                side.close()


def main() -> None:
    """Run until interrupted."""
    parser = argparse.ArgumentParser(description="TCP proxy with latency and a partition")
    parser.add_argument("listen", type=int)
    parser.add_argument("target", type=int)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--partition", type=float, nargs=2, metavar=("AFTER", "SECONDS"))
    chosen = parser.parse_args()
    with Proxy(chosen.target, chosen.listen, chosen.latency) as proxy, contextlib.suppress(KeyboardInterrupt):
        if chosen.partition:
            time.sleep(chosen.partition[0])
            proxy.partition()
            time.sleep(chosen.partition[1])
            proxy.heal()
        threading.Event().wait()


if __name__ == "__main__":
    main()
