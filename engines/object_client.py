"""Flower's client of a run's messages: a busy SuperLink is asked again, an object that is too long is not read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from logging import WARNING
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.common.logger import log

from fedcross.core.errors import UploadError

if TYPE_CHECKING:
    from flwr.superlink.grid import HttpGrid

T = TypeVar("T")
#: Objects pulled at once, and bytes beside an object's content in an answer.
AT_ONCE, ENVELOPE = 4, 256
#: Pause between two looks at what is not there yet: the first one and the longest one.
PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
#: Seconds for which the SuperLink may answer with an error of its own, because it is busy, until the run ends with it.
BUSY_S = 300.0


class NotYetError(Exception):
    """An object of a reply was announced, but has not been sent so far."""


class LostError(Exception):
    """An object of a reply does not exist any more."""


def patiently(call: Callable[[], T], seconds: float = BUSY_S) -> T:
    """Return ``call()``; repeat it for up to `seconds` while the SuperLink answers with an error of its own.

    A device that announces a reply of many thousand objects keeps the SuperLink's database busy for seconds. Other
    calls then end with status 500, which Flower's client does not repeat.
    """
    import httpx

    deadline, pause = time.monotonic() + seconds, PAUSE_S
    while True:
        try:
            return call()
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error or time.monotonic() > deadline:
                raise
            log(WARNING, "fedcross: the SuperLink is busy (status %s); asked again", error.response.status_code)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


class ObjectClient:
    """What is sent and pulled beside the grid's own calls, with the grid's own client.

    Parameters
    ----------
    grid : HttpGrid
        Flower's grid, connected or not.
    """

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._limit = threading.local()
        self._watched: Any = None

    @property
    def client(self) -> Any:
        """Flower's client; answers that are longer than expected are refused before they are read."""
        client = self._grid._runtime_client
        if client is not self._watched:
            client._client.event_hooks["response"].append(self._not_longer)
            self._watched = client
        return client

    def _not_longer(self, response: Any) -> None:
        most = getattr(self._limit, "most", None)
        length = response.headers.get("content-length")
        if most is not None and length is not None and int(length) > most + ENVELOPE:
            raise UploadError("too_large", f"an object of {length} bytes, {most} at most")

    def pull(self, names: list[str], most: int) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of objects, a few of them at once; stop at the first one that is not there."""
        if len(names) == 1:
            yield names[0], self._object(names[0], most)
            return
        open_ones: deque[tuple[str, Future[bytes]]] = deque()
        left = deque(names)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                while left or open_ones:
                    while left and len(open_ones) < AT_ONCE:
                        name = left.popleft()
                        open_ones.append((name, pool.submit(self._object, name, most)))
                    name, future = open_ones.popleft()
                    yield name, future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _object(self, name: str, most: int) -> bytes:
        from flwr.proto.message_pb2 import PullObjectRequest

        request = PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=name)
        self._limit.most = most
        try:
            found = patiently(lambda: self.client.PullObject(request))
        finally:
            self._limit.most = None
        if not found.object_found:
            raise LostError(name)
        if not found.object_available:
            raise NotYetError(name)
        return bytes(found.object_content)
