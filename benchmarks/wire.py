"""What a round costs besides training: seconds and bytes of messages, on every engine and with compression.

Three clients train two examples each. Seconds besides training are ``seconds - seconds_training / workers``; bytes are
those of the messages, beside the bytes of the model itself.
"""

from __future__ import annotations

import pandas as pd

from benchmarks.harness import Workload, fedcross_rounds, scratch

VARIANTS = {
    "local, one process": ["engine.workers=1"],
    "local, two workers": ["engine.workers=2"],
    "batched": ["engine=batched"],
    "superlink: three SuperNodes, TLS": ["engine=superlink"],
    "superlink, uploads int8": ["engine=superlink", "compression.up=int8"],
}


def measure(quick: bool) -> pd.DataFrame:
    """Return a row for each engine."""
    from fedcross.conf.schema import load

    work = Workload(clients=3, examples=2, drawn=3, epochs=1, batch=2)
    rows = []
    for name, more in list(VARIANTS.items())[: 2 if quick else None]:
        with scratch(work) as folder:
            settings = work.settings(folder, "evaluate_every=1000", *more)
            found = fedcross_rounds(settings, 3 if quick else 11)
            config = load(settings)
            network, _ = config.network(config.load_data().task)
        size = 4 * sum(tensor.numel() for tensor in network.state_dict().values())
        rows.append(
            {
                "engine": name,
                "s/round": found["seconds"].median(),
                "s training": found["seconds_training"].median(),
                "bytes down / model": found["bytes_down"].median() / work.drawn / size,
                "bytes up / model": found["bytes_up"].median() / work.drawn / size,
            }
        )
    return pd.DataFrame(rows)
