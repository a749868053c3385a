"""The live page of a run as an observer: feeds a board and serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http.server import ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedcross.conf.schema import RunConfig
from fedcross.server.board import Board
from fedcross.server.live import ADDRESS, place, serve
from fedcross.server.observers import Observer


class LivePage(Observer):
    """Serves the page of the run at host and port `address` until the run ends; without it if the port is taken."""

    watches = frozenset({"events"})

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self.board, self._folder, self._address = Board(), folder, address
        self._server: ThreadingHTTPServer | None = None

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Open the page."""
        self.request("run_started", run)
        self.board.recall(lines)
        try:
            self._server = serve(self.board, self._folder, *self._address)
        except (OSError, ValueError) as error:
            log(WARNING, "fedcross: no live page at %s:%s (%s); the run goes on without.", *self._address, error)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Note an event, and how many clients are connected."""
        self.board.online = fields.get("connected", self.board.online)
        self.board.note(event, fields)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Show the round."""
        self.request("round_finished", entry)

    def checkpoint_written(self, number: int, seconds: float) -> None:
        """Show the checkpoint."""
        self.request("checkpoint_written", {"round": number, "seconds": seconds})

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Show how the run ended and close the page."""
        if error is not None:
            self.request("run_failed", {"text": str(error) or type(error).__name__})
        else:
            self.request("run_stopped" if result is None else "run_finished", result or {})
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            (self._folder / ADDRESS).unlink(missing_ok=True)


def live_page(config: RunConfig, folder: Path) -> LivePage | None:
    """Return the page of the run; None if it has none."""
    address = place(config)
    return None if address is None else LivePage(folder, address)
