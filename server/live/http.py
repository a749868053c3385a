"""Serves the live page of a run, and ``/metrics`` in Prometheus' text format, from a thread of the server.

``serve.*`` are settings of a run. ``FEDCROSS_PAGE=HOST:PORT`` gives every run on a machine a page.
``FEDCROSS_PAGE_TOKEN_FILE`` names the file of its token; where others reach the page, the default is a random one.
``FEDCROSS_PAGE_URL`` is the page's address behind a proxy.
"""

from __future__ import annotations

import hmac
import json
import os
import resource
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError
from fedcross.core.events import say
from fedcross.core.files import write_private
from fedcross.server.live.page import PAGE

PLACE, TOKEN_FILE, URL = "FEDCROSS_PAGE", "FEDCROSS_PAGE_TOKEN_FILE", "FEDCROSS_PAGE_URL"
Snapshot = Callable[[], dict[str, Any]]
COOKIE, LOOPBACK = "fedcross-page", ("127.0.0.1", "localhost", "::1")
#: File in the run's folder with the page's address and token, for this user only.
ADDRESS = "page.url"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def place(config: RunConfig) -> tuple[str, int] | None:
    """Return host and port of the run's page; None if it has none; ConfigError if FEDCROSS_PAGE is no address."""
    own = os.environ.get(PLACE, "")
    if not own:
        return (config.serve.host, config.serve.port) if config.serve.page else None
    host, _, port = own.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{PLACE}={own}: give HOST:PORT, for example 127.0.0.1:8080.")
    return host.strip("[]"), int(port)


def serve(snapshot: Snapshot, folder: Path, host: str, port: int) -> ThreadingHTTPServer:
    """Start the page of the run in `folder` and say where it is."""
    path = os.environ.get(TOKEN_FILE, "")
    token = Path(path).read_text(encoding="ascii").strip() if path else ""
    token = token or ("" if host in LOOPBACK else secrets.token_urlsafe(24))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("PageServer", (ThreadingHTTPServer,), {"address_family": family})
    server: ThreadingHTTPServer = kind((host, port), _handler(snapshot, folder, token))
    base = os.environ.get(URL) or f"http://{host}:{server.server_address[1]}/"
    write_private(folder / ADDRESS, f"{base}{f'?token={quote(token)}' if token else ''}\n".encode())
    threading.Thread(target=server.serve_forever, name="fedcross-page", daemon=True).start()
    say(f"Live page: {base}" + (f" (with its token in {folder / ADDRESS})" if token else ""))
    return server


def _handler(snapshot: Snapshot, folder: Path, token: str) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers one request."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a request to come

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            given = parse_qs(url.query).get("token", [""])[0]
            if url.path == "/" and token and hmac.compare_digest(given.encode(), token.encode()):
                cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict"
                self._answer(303, "", "text/plain", {"Location": "./", "Set-Cookie": cookie})
            elif not self._allowed():
                self._answer(401, "A token is needed: open the address in the run's page.url.\n", "text/plain")
            elif url.path == "/":
                self._answer(200, PAGE, "text/html")
            elif url.path == "/state":
                # Numbers that JSON does not have become null.
                state = json.loads(json.dumps(snapshot()), parse_constant=lambda _: None)
                self._answer(200, json.dumps(state), "application/json")
            elif url.path == "/metrics":
                self._answer(200, metrics(snapshot(), folder), "text/plain; version=0.0.4")
            else:
                self._answer(404, "", "text/plain")

        def _allowed(self) -> bool:
            """Without a token, another host's name means that a foreign web page asks."""
            if not token:
                return self.headers.get("host", "").rpartition(":")[0].strip("[]") in LOOPBACK
            cookie = SimpleCookie(self.headers.get("cookie", "")).get(COOKIE)
            given = self.headers.get("authorization", "").removeprefix("Bearer ") or (cookie.value if cookie else "")
            return hmac.compare_digest(given.encode(), token.encode())

        def _answer(self, status: int, text: str, kind: str, more: dict[str, str] | None = None) -> None:
            self.send_response(status)
            content = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(text.encode()))}
            for name, value in {**HEADERS, **content, **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """Write no log: a first visit has the token in its address."""

    return Handler


def metrics(now: dict[str, Any], folder: Path) -> str:
    """Return a snapshot of the live page in Prometheus' text format."""
    run, totals = now["run"], now["totals"]
    labels = ",".join(f'{name}="{run.get(name, "")}"' for name in ("run", "method", "task", "seed"))
    sums = {"requests_total": "requests", "visits_total": "clients", "slots_lost_total": "dropped"}
    sums |= {f"{name}_total": name for name in ("clipped", "spares")}
    sums |= {f'bytes_total{{direction="{way}"}}': f"bytes_{way}" for way in ("down", "up")}
    phases = {"round": "seconds", "training": "seconds_training", "aggregation": "seconds_aggregation"}
    sums |= {f'seconds_total{{phase="{phase}"}}': name for phase, name in phases.items()}
    values: dict[str, Any] = {
        f"run_info{{{labels}}}": 1 if run else None,
        "up": int(now["state"] == "running"),
        "round": now["round"],
        "rounds_planned": run.get("rounds", 0),
        "rounds_total": now["rounds_done"],
        **{name: totals.get(field, 0) for name, field in sums.items()},
        "devices_online": now["online"] or 0,
        **{f'replies_rejected_total{{reason="{reason}"}}': count for reason, count in now["rejected"].items()},
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "checkpoint_age_seconds": now["checkpoint"] and time.time() - now["checkpoint"],
        "memory_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "test_accuracy": now["curve"][-1]["accuracy"] if now["curve"] else None,
        "pool_similarity": now["last"].get("pool_similarity_mean"),
    }
    return "".join(f"fedcross_{name} {value}\n" for name, value in values.items() if value is not None)
