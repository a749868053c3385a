"""Every method but the one of ``smoke``: two rounds on both engines, compared with the CPU."""

from __future__ import annotations

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Lines
from benchmarks.gpu.rounds import FIRST, on_both_engines
from fedcross.conf.compose import CONF

METHODS = tuple(sorted({path.stem for path in (CONF / "method").glob("*.yaml")} - {FIRST}))


def measure(place: Place, line: Lines) -> None:
    """Write two lines for each method."""
    for method in METHODS[:1] if place.tiny else METHODS:
        on_both_engines(place, line, method)
