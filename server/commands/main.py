"""The ``fedcross`` command: runs a subcommand, or a run or sweep in Hydra's grammar."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from fedcross.core.errors import ConfigError, FedcrossError, StorageError, closed_to_user, nearest
from fedcross.core.events import failed, log_format, structured
from fedcross.server.command_line import SUBCOMMANDS

WRONG_USE, INTERRUPTED = 2, 130
#: As a shell reports a program that SIGPIPE ended.
PIPE_CLOSED = 141


def run() -> None:
    """Run the command line and exit; the entry point of the installed command."""
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        if "triton" not in sys.modules:  # otherwise Python collects all of torch for half a second
            gc.freeze()


def main(arguments: Sequence[str]) -> int:
    """Run `arguments` and return the exit code: 0, 1 for a failure, 2 for wrong use, 130 for Ctrl-C, 141."""
    first = next(iter(arguments), "")
    name = f"fedcross {first}: " if first in SUBCOMMANDS else ""
    json = first not in SUBCOMMANDS and "log.format=json" in arguments
    with log_format("json" if json else "text"):
        try:
            return _run(first, list(arguments))
        except BrokenPipeError:  # the reader of the output (a pager, head) has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0 if first in SUBCOMMANDS or first.startswith("-") else PIPE_CLOSED
        except KeyboardInterrupt:
            print(f"{name}interrupted", file=sys.stderr)
            return INTERRUPTED
        except PermissionError as error:
            if error.filename is None:  # not about a file
                raise
            return _report(StorageError(closed_to_user(error)), name)
        except FedcrossError as error:
            return _report(error, name)
        except Exception as error:
            if structured():
                failed(error)
            raise


def _run(first: str, arguments: list[str]) -> int:
    """Run the subcommand `first`, or else a run or a sweep."""
    if first == "--version":
        print(", ".join(f"{name} {version(name)}" for name in ("fedcross", "flwr", "torch")))
        return 0
    if first in ("help", "--help", "-h"):
        from fedcross.server.commands.help_text import help_text

        print(help_text())
        return 0
    if first in SUBCOMMANDS:
        code: int = import_module(SUBCOMMANDS[first]).main(arguments[1:])
        return code
    if first and not first.startswith("-") and not any(mark in first for mark in "=~"):
        print(f"fedcross {first}: no such subcommand. {nearest(first, list(SUBCOMMANDS))}", file=sys.stderr)
        print("To start a run, give its settings: fedcross method=fedcross task=digits", file=sys.stderr)
        return WRONG_USE
    from fedcross.server.commands.run import main as run_or_sweep

    return run_or_sweep(arguments)


def _report(error: FedcrossError, name: str) -> int:
    """Print `error`, or write it as an event; return its exit code."""
    if structured():
        failed(error)
        return error.exit_code
    text = str(error)
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        text = "\n  - ".join([f"{len(error.faults)} errors in the configuration:", *error.faults])
    print(f"{name}{text}", file=sys.stderr)
    return error.exit_code
