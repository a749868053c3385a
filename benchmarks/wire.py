"""What a round costs besides training: seconds and bytes of messages, on every engine; and the first round.

Ten clients with 500 examples train LeNet-5; three with two examples over a network. Seconds besides training are those
that do not grow with the epochs, from the fastest rounds of one and of three. Bytes are those of the messages, beside
the model's. The first round is that of a process which finds the machine's caches filled.
"""

from __future__ import annotations

import pandas as pd

from benchmarks.harness import Workload, child, scratch

VARIANTS = {
    "local, one process": ["engine.workers=1"],
    "local, two workers": ["engine.workers=2"],
    "batched": ["engine=batched"],
    "superlink: three SuperNodes, TLS": ["engine=superlink"],
    "superlink, uploads int8": ["engine=superlink", "compression.up=int8"],
}
RUN = """
import json, sys
from benchmarks.harness import fedcross_rounds
found = fedcross_rounds(sys.argv[2:], int(sys.argv[1]))
later = found.iloc[1:].median(numeric_only=True)
told = {name: float(later[name]) for name in ("seconds", "bytes_down", "bytes_up")}
told |= {"first": float(found["seconds"].iloc[0]), "fastest": float(found["seconds"].iloc[1:].min())}
print(json.dumps(told))
"""


def measure(quick: bool) -> pd.DataFrame:
    """Return a row for each engine."""
    rows = []
    for name, more in list(VARIANTS.items())[: 2 if quick else None]:
        clients, examples = (3, 2) if quick or "engine=superlink" in more else (10, 500)
        found = {}
        for epochs in (1, 3):
            work = Workload(clients=clients, examples=examples, drawn=clients, epochs=epochs)
            with scratch(work) as folder:
                settings = work.settings(folder, "evaluate_every=1000", *more)
                found[epochs] = child(RUN, 4 if quick else 21, *settings)
        one, three = found[1], found[3]
        model = 4 * 62_006 * clients  # bytes of LeNet-5 in float32
        rows.append(
            {
                "engine": name,
                "s/round": one["seconds"],
                "s besides training": 1.5 * one["fastest"] - 0.5 * three["fastest"],
                "first round, s more": three["first"] - three["seconds"],
                "bytes down / model": one["bytes_down"] / model,
                "bytes up / model": one["bytes_up"] / model,
            }
        )
    return pd.DataFrame(rows)
