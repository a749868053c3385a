"""Time and memory of a round against the federation's size, the clients drawn and the model; and a check for leaks.

Every row runs in a new process. Clients hold 20 random 3x32x32 images each and train for one epoch: cost must grow with
the work (K times steps), not with the number of clients.
"""

from __future__ import annotations

import pandas as pd

from benchmarks.harness import Workload, child, scratch

CASES = [
    *((n, 10, "lenet5") for n in (10, 100, 1_000, 10_000)),
    *((100, k, "lenet5") for k in (5, 20, 50, 100)),
    *((100, 10, model) for model in ("cnn_w", "resnet18", "vgg16_bn")),
]
RUN = """
import json, sys, threading, time
import numpy as np
from benchmarks.harness import fedcross_rounds

memory, done = [], threading.Event()
def watch():
    while not done.wait(0.2):
        pages = int(open("/proc/self/statm").read().split()[1])
        memory.append((time.monotonic(), pages * 4096 / 2**20))
threading.Thread(target=watch, daemon=True).start()
found = fedcross_rounds(sys.argv[2:], int(sys.argv[1]))
done.set()
tail = np.array(memory[len(memory) // 3:])
growth = float((tail[-len(tail) // 4:, 1].mean() - tail[: len(tail) // 4, 1].mean())) if len(tail) > 8 else 0.0
print(json.dumps({"s/round": float(found["seconds"].iloc[1:].median()), "growth MiB": growth}))
"""


def measure(quick: bool) -> pd.DataFrame:
    """Return a row for each case; the last one runs 300 rounds, for the growth of memory."""
    cases = [(*case, 5) for case in CASES] + [(100, 10, "lenet5", 300)]
    rows = []
    for clients, drawn, model, rounds in [(10, 2, "lenet5", 3)] if quick else cases:
        work = Workload(model, clients=clients, examples=20, drawn=drawn, epochs=1)
        row = {"clients": clients, "K": drawn, "model": model, "rounds": rounds}
        with scratch(work) as folder:
            try:
                row |= child(RUN, rounds, *work.settings(folder, "engine.workers=1", "evaluate_every=1000"))
            except RuntimeError as error:
                row["error"] = str(error)
        rows.append(row)
    return pd.DataFrame(rows)
