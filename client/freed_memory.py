"""Memory that a training step has freed is kept for the next one, where the C library would give it back.

glibc gives the top of its heap back to the kernel when as little as 128 KiB (later: twice the largest block that was
freed) lie free there. A step of a convolutional network frees hundreds of MiB, and the next one asks for them again,
page by page: docs/performance.md has what that costs.
"""

from __future__ import annotations

import ctypes
import os

#: Most bytes that stay at the top of the heap.
KEPT = 256 << 20
#: Blocks from this size on are no part of the heap, and are given back at once; glibc's own upper limit.
APART = 32 << 20
#: malloc.h's names of the two settings.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Who has set one of these knows better.
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep up to KEPT freed bytes; return whether it does.

    Changes nothing where the user has chosen an allocator or its settings, and where the C library has no ``mallopt``
    (macOS, Windows, musl).
    """
    if any(name in os.environ for name in OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT) and mallopt(M_MMAP_THRESHOLD, APART))
