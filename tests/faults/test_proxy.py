import socket
import threading
import time

import pytest

from tests.support.proxy import BACKLOG, Proxy


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def cut(proxy):
    """Return when the partition is complete, however long the proxy's thread had to wait for its turn."""
    proxy.partition()
    deadline = time.monotonic() + 600
    while len(proxy._plugs) <= BACKLOG:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)


def call(proxy, data, timeout=600):
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout) as connection:
        connection.sendall(data)
        found = b""
        while len(found) < len(data):
            found += connection.recv(1 << 16)
        return found


def test_everything_passes_and_is_counted(echo):
    data = bytes(range(256)) * 4000
    with Proxy(echo) as proxy:
        assert call(proxy, data) == data
        assert (proxy.up, proxy.down, proxy.connections) == (len(data), len(data), 1)


def test_latency_is_added_to_each_direction(echo):
    with Proxy(echo, latency=0.1) as proxy:
        started = time.monotonic()
        call(proxy, b"x")
        assert time.monotonic() - started >= 0.2


def test_a_partition_holds_everything_and_loses_nothing(echo):
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=600) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        cut(proxy)
        connection.sendall(b"b")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.heal()
        connection.settimeout(600)
        assert connection.recv(1) == b"b"


def test_in_a_partition_nobody_answers_a_new_connection(echo):
    with Proxy(echo) as proxy:
        assert call(proxy, b"a") == b"a"
        for _ in range(2):
            cut(proxy)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    socket.create_connection(("127.0.0.1", proxy.port), timeout=0.2)
            proxy.heal()
            assert call(proxy, b"b") == b"b"


def test_a_reset_is_seen(echo):
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=600) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_closed_target_is_a_closed_connection():
    with Proxy(1) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=600) as connection:
        assert connection.recv(1) == b""
