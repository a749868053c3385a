"""The ``fedcross`` command: runs a subcommand, or a run or sweep in Hydra's grammar."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from fedcross.core.errors import ConfigError, FedcrossError, StorageError, closed_to_user, nearest
from fedcross.core.events import failed, log_format, structured
from fedcross.core.paths import page, room
from fedcross.server import SUBCOMMANDS

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
    with log_format("json" if not name and "log.format=json" in arguments else "text"):
        try:
            return _run(first, list(arguments))
        except BrokenPipeError:  # the reader of the output (a pager, head) has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0 if name or first.startswith("-") else PIPE_CLOSED
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
            failed(error)  # only as an event
            raise


def _run(first: str, arguments: list[str]) -> int:
    """Run the subcommand `first`, or else a run or a sweep."""
    if first == "--version":
        print(", ".join(f"{name} {version(name)}" for name in ("fedcross", "flwr", "torch")))
    elif first == "help" or (first not in SUBCOMMANDS and {"--help", "-h"} & set(arguments)):
        print(help_text())
    elif first in SUBCOMMANDS:
        module = import_module(f"fedcross.server.commands.{first.replace('-', '_')}")
        return int(module.main(arguments[1:]))
    elif first and not first.startswith("-") and not any(mark in first for mark in "=~"):
        print(f"fedcross {first}: no such subcommand. {nearest(first, list(SUBCOMMANDS))}", file=sys.stderr)
        print("To start a run, give its settings: fedcross method=fedcross task=digits", file=sys.stderr)
        return WRONG_USE
    else:
        from fedcross.server.commands.run import main as run_or_sweep

        return run_or_sweep(arguments)
    return 0


def _report(error: FedcrossError, name: str) -> int:
    """Print `error`, or write it as an event; return its exit code."""
    text = str(error)
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        text = "\n  - ".join([f"{len(error.faults)} errors in the configuration:", *error.faults])
    failed(error)
    if not structured():
        print(f"{name}{text}", file=sys.stderr)
    return error.exit_code


def help_text(width: int | None = None) -> str:
    """Return the help in lines of at most `width` columns; by default as wide as the terminal."""
    import yaml

    width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 40), 120)
    text = yaml.safe_load((room("conf") / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    groups = []
    for folder in sorted(path for path in room("conf").iterdir() if path.is_dir()):
        names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("[!_]*.yaml"))
        groups += [f"{folder.name}: {', '.join(names)}"] if names else []
    text = text.replace("$APP_CONFIG_GROUPS", "\n".join(groups))
    text = re.sub(r"\bdocs/(\S+\.md)", lambda found: page(found[1]), text)
    wrap = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    lines = ([line] if len(line) <= width else wrap.wrap(line) for line in text.splitlines())
    return "\n".join(part for parts in lines for part in parts)
