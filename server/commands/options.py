"""Types of command-line options, so that a value out of range is told before any work starts."""

from __future__ import annotations

import argparse
import math


def share(text: str) -> float:
    """Return a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write 50 % as 0.5")
    return value


def not_negative(text: str) -> float:
    """Return a finite number from 0 on."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value
