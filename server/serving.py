"""Whether and where a run's process serves the live page: the settings ``serve.*``, or what this machine says.

A run on a SuperLink is submitted from anywhere, but its page opens where its ServerApp runs. So that machine may say
``FEDCROSS_PAGE=HOST:PORT``: every run that it serves has a page there, whatever the run's settings are, as the compose
federation has it. Of two runs at once the second one finds the port taken, says so and goes on without a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.common.logger import log

from fedcross.core.extras import install
from fedcross.server.board import Board
from fedcross.server.page_variables import own_place

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig


def place(config: RunConfig) -> tuple[str, int] | None:
    """Return host and port of the run's page; None if it has none.

    Raises
    ------
    ConfigError
        If ``FEDCROSS_PAGE`` is no address.
    """
    own = own_place()
    return own or ((config.serve.host, config.serve.port) if config.serve.page else None)


def board_of(config: RunConfig) -> Board | None:
    """Return a board for the run's page to show; None if the run has no page."""
    return None if place(config) is None else Board(config.federation.deadline_s)


@contextmanager
def page_of(board: Board, config: RunConfig, folder: Path) -> Iterator[None]:
    """Serve the page of `board` inside the block; an error that ends the block is noted on it."""
    where = place(config)
    page = None
    if where is not None:
        try:
            from fedcross.server.live import serve
        except ImportError as error:  # FEDCROSS_PAGE where the extra is missing; serve.page=true is refused before
            log(WARNING, "fedcross: no live page (%s). %s", error, install("page"))
        else:
            page = serve(board, folder, *where)
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        board.note("run_failed", {"text": "interrupted" if interrupted else str(error) or type(error).__name__})
        raise
    finally:
        if page is not None:
            page.close()
