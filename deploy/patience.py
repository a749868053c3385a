"""Runs Flower's SuperLink or SuperNode with more patience for a process that starts.

::

    python -m fedcross.deploy.patience flower-supernode --superlink gateway:8443 ...

Flower 1.41 gives a ServerApp or ClientApp 30 seconds from the moment its task is handed out to its first sign of life.
On a busy device a start takes longer: its task is then handed out again, to one more process that starts beside the
first and makes all of them slower, and no round ends. The time is a constant of Flower's; a running process still
has to give a sign of life every minute. Can go when ClientApps no longer start once per message.
"""

from __future__ import annotations

import sys
from importlib import import_module

#: Seconds for a start, and for a running process until it counts as dead (Flower's own).
START_S, ALIVE_S = 300, 60
_STATES = ("flwr.supercore.corestate.in_memory_corestate", "flwr.supercore.corestate.sql_corestate")
PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
}


def be_patient() -> None:
    """Change Flower's times, in the two modules that hold tasks."""
    for name in _STATES:
        module = import_module(name)
        for constant, seconds in (("HEARTBEAT_DEFAULT_INTERVAL", START_S), ("HEARTBEAT_PATIENCE", ALIVE_S / START_S)):
            if not hasattr(module, constant):
                raise SystemExit(f"{name} has no {constant}: this version of Flower is not supported.")
            setattr(module, constant, seconds)


def main() -> None:
    """Become the program named first on the command line."""
    module, function = PROGRAMS[sys.argv[1]]
    del sys.argv[0]
    be_patient()
    getattr(import_module(module), function)()


if __name__ == "__main__":
    main()
