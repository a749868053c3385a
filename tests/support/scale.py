"""How much of a fault test runs: a quick part, and all of it where ``FEDCROSS_RELIABILITY=whole``."""

import os
from pathlib import Path

WHOLE = os.environ.get("FEDCROSS_RELIABILITY") == "whole"


def size(quick: int, whole: int) -> int:
    """Return the number of trials."""
    return whole if WHOLE else quick


def rss() -> int:
    """Return the bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
