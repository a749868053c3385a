"""A process that answers messages with the ClientApp of one bundle; a script.

It imports no installed fedcross: the server decides by its bundle which one trains. A ClientApp may have attributes:

- ``stays_loaded``: true if it may answer several messages in one process.
- ``sound``: false once the process should end (its GPU is in an unknown state, say).
- ``prepare(context)``: called after a reply, to load what the next message will need.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import tomllib
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

#: Name of this program, by which an app knows that it runs here.
NAME = "fedcross-executor"
#: Flower's codes for an app that raises an error, and for one that cannot be loaded.
RAISED, NOT_LOADED = 2, 3


def load(folder: Path) -> Any:
    """Return the ClientApp of the unpacked bundle in `folder`, which comes first on ``sys.path`` from now on."""
    with (folder / "pyproject.toml").open("rb") as file:
        module, _, name = tomllib.load(file)["tool"]["flwr"]["app"]["components"]["clientapp"].partition(":")
    sys.path.insert(0, str(folder))
    return getattr(import_module(module), name)


def answer(app: Any, message: Message, context: Context) -> tuple[Message, str]:
    """Return the reply of `app` and, if it raised an error, the error's type, text, file and line."""
    try:
        return app(message, context), ""
    except Exception as error:  # noqa: BLE001 - whatever an app raises becomes a reply
        return _failed(RAISED, message, error)


def _failed(code: int, message: Message, error: Exception) -> tuple[Message, str]:
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    fault = f"{type(error).__name__}: {error}{place}"
    return Message(Error(code, fault), reply_to=message), fault


def main() -> None:
    """Answer messages from the connection with descriptor ``argv[1]``, with the bundle in the folder ``argv[2]``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line, folder, private = Connection(int(sys.argv[1])), Path(sys.argv[2]), _private()
    sys.argv = [NAME]
    app: Any = None
    while True:
        try:
            message, context = line.recv()
        except EOFError:
            return
        private.identify(context.run_id, context.node_id, 1)
        try:
            app = app or load(folder)
        except Exception as error:  # noqa: BLE001
            reply, fault = _failed(NOT_LOADED, message, error)
        else:
            reply, fault = answer(app, message, context)
        stays = bool(getattr(app, "stays_loaded", False)) and bool(getattr(app, "sound", True))
        line.send((reply, context, fault, stays))
        if not stays:
            return
        if not fault and (prepare := getattr(app, "prepare", None)) is not None:
            try:
                prepare(context)
            except Exception:  # noqa: BLE001 - the next message raises it again, in its reply
                traceback.print_exc()


def _private() -> Any:
    """Return ``engines/flower_private.py``, imported without the rest of fedcross."""
    found = spec_from_file_location("_flower_private", Path(__file__).resolve().parents[1] / "flower_private.py")
    if found is None or found.loader is None:
        sys.exit("engines/flower_private.py: this part of fedcross is missing. Install fedcross again.")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
