"""A round of local training: the local engine against a textbook loop in two processes, in turns.

The rounds of fedcross are complete, with messages, checks, aggregation, evaluation, metrics and checkpoint; the loops
(:mod:`benchmarks.peer_rounds`) only train and average.
"""

from __future__ import annotations

from functools import partial

from benchmarks.peers import compare

measure = partial(compare, frameworks=False)
