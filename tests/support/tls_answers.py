"""A server that is not the federation's: answers every request over TLS with one status, by a clock of its own.

::

    python -m tests.support.tls_answers HOST SERVER.crt SERVER.key STATUS SECONDS_AHEAD      # prints its port
"""

from __future__ import annotations

import ssl
import sys
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST, STATUS, AHEAD_S = sys.argv[1], int(sys.argv[4]), float(sys.argv[5])
#: As status: 200 to GET, and the connection is closed after a POST.
HANGS_UP, OK = 0, 200


class Answer(BaseHTTPRequestHandler):
    """Says the same to everybody."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the time by this server's clock."""
        return formatdate(time.time() + AHEAD_S, usegmt=True)

    def do_POST(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        if STATUS == HANGS_UP and self.command == "POST":
            self.close_connection = True
            return
        self.send_response(STATUS or OK)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Say nothing."""


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[2], sys.argv[3])
server = ThreadingHTTPServer((HOST, 0), Answer)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
