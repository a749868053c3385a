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

from fedcross.engines import guarded

#: Seconds for a start, and for a running process until it counts as dead (Flower's own).
START_S, ALIVE_S = 300, 60
_STATES = ("flwr.supercore.corestate.in_memory_corestate", "flwr.supercore.corestate.sql_corestate")
PROGRAMS = ("flower-superlink", "flower-supernode")


def be_patient() -> None:
    """Change Flower's times, in the two modules that hold tasks."""
    for name in _STATES:
        module = import_module(name)
        for constant, seconds in (("HEARTBEAT_DEFAULT_INTERVAL", START_S), ("HEARTBEAT_PATIENCE", ALIVE_S / START_S)):
            if not hasattr(module, constant):
                raise SystemExit(f"{name} has no {constant}: this version of Flower is not supported.")
            setattr(module, constant, seconds)


def main() -> None:
    """Become the program named first on the command line; the SuperLink is guarded too (:mod:`engines.guarded`)."""
    del sys.argv[0]
    if sys.argv[0] not in PROGRAMS:
        raise SystemExit(f"{sys.argv[0]}: start one of {', '.join(PROGRAMS)}.")
    be_patient()
    if sys.argv[0] in guarded.OPEN:
        guarded.become(sys.argv[0])
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
