"""The ``fedcross`` command inside this process, and Python in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fedcross.server.commands.main import main


def subcommand(name: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs ``fedcross NAME`` with its arguments and returns the exit code."""
    return lambda arguments: main([name, *arguments])


def python(*arguments: str, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` to its end; return exit code and output. `options` as in :func:`subprocess.run`."""
    line = [sys.executable, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout, **options)
