"""A part of this folder in a process of its own, and the line to it: lines of JSON over a socket without a name."""

from __future__ import annotations

import json
import select
import socket
import subprocess
from contextlib import suppress
from typing import Any

from .program import command

GRACE_S = 10.0


class Partner:
    """A process and the line to it; it ends when the line is closed.

    Parameters
    ----------
    part : str
        Which one (:data:`program.PARTS`).
    *arguments : str
        Follow the number of the line's descriptor.
    own_session : bool
        Whether Ctrl-C reaches only this process.
    """

    def __init__(self, part: str, *arguments: str, own_session: bool = True) -> None:
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [*command(part), str(other.fileno()), *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=own_session,
            )
        self._line, self._rest = own, b""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def tell(self, said: dict[str, Any]) -> None:
        """Say something; a process that has died shows in :meth:`hear`."""
        with suppress(OSError):
            self._line.sendall(f"{json.dumps(said)}\n".encode())

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return what the process says next, or None if it says nothing within `seconds`.

        Raises
        ------
        EOFError
            If it has ended.
        """
        while b"\n" not in self._rest:
            if not select.select([self._line], [], [], seconds)[0]:
                return None
            try:
                found = self._line.recv(1 << 16)
            except OSError as error:
                raise EOFError from error
            if not found:
                raise EOFError
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def poll(self) -> int | None:
        """Return the process's exit code, None if it has not ended."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def release(self) -> None:
        """Close the line to a process that needs it no more."""
        self._line.close()

    def end(self) -> int:
        """Close the line, on which the process ends, and return its exit code; negative numbers are signals."""
        self._line.close()
        try:
            return self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
