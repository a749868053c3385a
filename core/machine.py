"""What a run's record says about the machine that it ran on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

#: Where Linux tells about its processors.
CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """Return the processor's name as the system gives it, else the architecture."""
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def described() -> str:
    """Return one line: architecture, system, processor and number of cores."""
    return f"{platform.machine()} {platform.system()}, {processor()}, {os.cpu_count()} cores"
