"""The ``fedcross`` command: runs a subcommand, or else a run or a sweep in Hydra's grammar."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from fedcross.core.causes import PAGE, cause_of
from fedcross.core.errors import ConfigError, FedcrossError, StorageError, closed_to_user, nearest
from fedcross.core.events import failed, log_format, structured

#: Subcommand -> the module with its ``main(arguments)``, and a short description.
SUBCOMMANDS = {
    "report": ("fedcross.server.commands.report", "tables, curves and a page from run folders"),
    "export": ("fedcross.server.commands.export", "write a model of a run, finished or still running, to a file"),
    "analyse": ("fedcross.server.commands.analyse", "plots of the models that a run kept (t-SNE, Grad-CAM, ...)"),
    "landscape": ("fedcross.server.commands.landscape", "loss surfaces around the global models of runs"),
    "partition": ("fedcross.server.commands.partition", "examples per client and class, as a table and a bubble plot"),
    "record": ("fedcross.server.commands.record", "small records of runs for the repository, and the results page"),
    "audit": ("fedcross.server.commands.audit", "check a run's audit trail; which devices trained its model"),
    "doctor": ("fedcross.server.commands.doctor", "check this machine or a deployment"),
    "deploy": ("fedcross.server.commands.deploy", "keys, bundles and programs of a federation of devices"),
    "new-method": ("fedcross.server.commands.new_method", "write the three files of a method of your own"),
    "onboard": ("fedcross.server.commands.onboard", "how fast a new client learns from finished runs"),
}
WRONG_USE = 2
#: With this among the settings, everything that a run says is an event of the structured log.
JSON = "log.format=json"
#: As a shell reports a program that SIGPIPE ended.
PIPE_CLOSED = 141


def run() -> None:
    """Run the command line and exit; the entry point of the installed command."""
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        # Else Python looks for garbage in all of torch before the process ends: half a second of a core. Triton, which
        # comes with torchvision, would report what is left of it as leaks, on 30 lines.
        if "triton" not in sys.modules:
            gc.freeze()


def main(arguments: Sequence[str]) -> int:
    """Run `arguments` and return the exit code: 0, 1 for a failure, 2 for wrong use, 130 for Ctrl-C, 141."""
    first = next(iter(arguments), "")
    name = f"fedcross {first}: " if first in SUBCOMMANDS else ""
    with log_format("json" if first not in SUBCOMMANDS and JSON in arguments else "text"):
        return _main(first, name, list(arguments))


def _main(first: str, name: str, arguments: list[str]) -> int:
    try:
        return _allowed(first, arguments)
    except BrokenPipeError:  # the reader of the output (a pager, head) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Whoever reads a table may stop reading; a run that is cut off so has not completed.
        from fedcross.server.commands.run import COST, SHOWING

        shows = first in SUBCOMMANDS or bool({COST, *SHOWING} & {one.split("=")[0] for one in arguments})
        return 0 if shows else PIPE_CLOSED
    except KeyboardInterrupt:  # of a subcommand: a run says itself how it goes on
        from fedcross.server.commands.run import INTERRUPTED

        print(f"{name}interrupted", file=sys.stderr)
        return INTERRUPTED
    except FedcrossError as error:
        if structured():
            failed(error, arguments)
        else:
            print(f"{name}{_text(error)}", file=sys.stderr)
            _name(str(error), arguments)
        return error.exit_code
    except Exception as error:
        if structured():
            failed(error, arguments)
        else:
            _name(f"{type(error).__name__}: {error}", arguments)
        raise


def _allowed(first: str, arguments: list[str]) -> int:
    """Run the command; a file or folder that this user may not use is a StorageError, wherever it was looked for.

    Up to Python 3.13 also the question whether a path exists fails below a folder of somebody else.
    """
    try:
        return _run(first, arguments)
    except PermissionError as error:
        if error.filename is None:  # not about a file
            raise
        raise StorageError(closed_to_user(error)) from error


def _run(first: str, arguments: list[str]) -> int:
    if first == "--version":
        print(", ".join(f"{name} {version(name)}" for name in ("fedcross", "flwr", "torch")))
        return 0
    if first == "help":
        arguments = ["--help"]
    if first not in SUBCOMMANDS:
        if first != "help" and first and not first.startswith("-") and not any(mark in first for mark in "=~"):
            print(f"fedcross {first}: no such subcommand. {nearest(first, list(SUBCOMMANDS))}", file=sys.stderr)
            print("To start a run, give its settings: fedcross method=fedcross task=digits", file=sys.stderr)
            return WRONG_USE
        from fedcross.server.commands.run import main as run_or_sweep

        return run_or_sweep(arguments)
    code: int = import_module(SUBCOMMANDS[first][0]).main(arguments[1:])
    return code


def _name(text: str, arguments: Sequence[str]) -> None:
    """Print the cause that `text`, said of the command line `arguments`, tells of, if it is in the table."""
    if (cause := cause_of(text, arguments)) is not None:
        print(f"Cause: {cause.name} ({PAGE})", file=sys.stderr)


def _text(error: FedcrossError) -> str:
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        return "\n".join([f"{len(error.faults)} errors in the configuration:", *(f"  - {f}" for f in error.faults)])
    return str(error)
