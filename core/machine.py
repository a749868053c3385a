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


def described(gpu: str | None = None) -> str:
    """Return one line: architecture, system, processor, number of cores, and the name of the `gpu` that is used."""
    known = f"{platform.machine()} {platform.system()}, {processor()}, {os.cpu_count()} cores"
    return f"{known}, {gpu}" if gpu else known
