"""Every method but the one of ``smoke``: two rounds on both engines, compared with the CPU.

And a few of them, each of another kind, on a network with batch normalisation and dropout.
"""

from __future__ import annotations

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Lines
from benchmarks.gpu.rounds import FIRST, on_both_engines
from fedcross.conf.compose import CONF

METHODS = tuple(sorted({path.stem for path in (CONF / "method").glob("*.yaml")} - {FIRST}))
#: A control variate, another loss over features, a second gradient, a closed-form term.
NORMED = ("scaffold", "moon", "fedsam", "feddyn")


def measure(place: Place, line: Lines) -> None:
    """Write two lines for each method, and two for each of :data:`NORMED` on the network `own`."""
    for method in METHODS[:1] if place.tiny else METHODS:
        on_both_engines(place, line, method)
    for method in () if place.tiny else NORMED:
        on_both_engines(place, line, method, "own")
