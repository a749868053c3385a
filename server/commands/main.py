"""The ``fedcross`` command: a subcommand by its name, else a run or a sweep in Hydra's grammar."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fedcross.core.errors import ConfigError, FedcrossError, nearest

#: Subcommand -> the module with its ``main(arguments)``, and what it does in a few words.
SUBCOMMANDS = {
    "report": ("fedcross.server.commands.report", "tables, curves and a page from run folders"),
    "export": ("fedcross.server.commands.export", "a model out of a run, finished or still running"),
    "analyse": ("fedcross.server.commands.analyse", "pictures of what the models of a run have learned"),
    "landscape": ("fedcross.server.commands.landscape", "how flat the global models of runs lie"),
    "partition": ("fedcross.server.commands.partition", "who owns what, as a table and a bubble plot"),
    "record": ("fedcross.server.commands.record", "small records of runs for the repository, and their page"),
    "doctor": ("fedcross.server.commands.doctor", "check this machine or a deployment"),
    "deploy": ("fedcross.server.commands.deploy", "keys, bundles and programs of a real federation"),
    "onboard": ("fedcross.server.commands.onboard", "how fast a new client learns from finished runs"),
}
WRONG_USE = 2


def run() -> None:
    """Run what the command line says and exit; the entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run `arguments` and return the exit code: 0, 1 for a failure, 2 for wrong use, 130 for Ctrl-C."""
    first = next(iter(arguments), "")
    name = f"fedcross {first}: " if first in SUBCOMMANDS else ""
    try:
        return _run(first, list(arguments))
    except BrokenPipeError:  # the reader of our output (a pager, head) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FedcrossError as error:
        print(f"{name}{_told(error)}", file=sys.stderr)
        return error.exit_code


def _run(first: str, arguments: list[str]) -> int:
    if first not in SUBCOMMANDS:
        if first and not first.startswith("-") and not any(mark in first for mark in "=~"):
            print(f"fedcross {first}: no such subcommand. {nearest(first, list(SUBCOMMANDS))}", file=sys.stderr)
            print("A run is described by settings: fedcross method=fedcross task=digits", file=sys.stderr)
            return WRONG_USE
        from fedcross.server.commands.run import main as run_or_sweep

        return run_or_sweep(arguments)
    code: int = import_module(SUBCOMMANDS[first][0]).main(arguments[1:])
    return code


def _told(error: FedcrossError) -> str:
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        return "\n".join([f"{len(error.faults)} faults in the configuration:", *(f"  - {f}" for f in error.faults)])
    return str(error)
