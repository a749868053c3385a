"""A device whose ClientApp process stays between messages. Flower starts a new process for each message.

:mod:`launcher` runs Flower's SuperNode, takes its tasks, and hands each message to :mod:`worker`, one process for each
app bundle. With a Flower that :data:`engines.flower_private.TRIED` does not name, the launcher becomes Flower's own
SuperNode, which is slower and otherwise equal.
"""

from __future__ import annotations

import sys


def command(port: int) -> list[str]:
    """Return how to start a device; the options of ``flower-supernode`` follow. `port` is free on this machine."""
    return [sys.executable, "-P", "-m", "fedcross.engines.warm_device.launcher", "--port", str(port)]
