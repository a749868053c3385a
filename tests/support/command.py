"""The ``fedcross`` command inside this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedcross.server.commands.main import main


def subcommand(name: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs ``fedcross NAME`` with its arguments and returns the exit code."""
    return lambda arguments: main([name, *arguments])
