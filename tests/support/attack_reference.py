"""The run that :mod:`tests.faults.attack_compose` compares with: no network, the same replies missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fedcross.server.reply_log import records

#: (round, client)
Place = tuple[int, int]


def accepted(folder: Path) -> set[Place]:
    """Return whose replies the run's log of accepted replies holds, as far as it goes."""
    path = folder / "checkpoints" / "accepted.log"
    if not path.exists():
        return set()
    return {(facts["round"], facts["client"]) for facts, _, _ in records(path) if facts["kind"] == "reply"}


def lost(lines: Sequence[dict[str, Any]], seen: set[Place], clients: int) -> list[Place]:
    """Return whose replies the model lacks.

    Parameters
    ----------
    lines : sequence of dict
        ``metrics.jsonl``.
    seen : set of (int, int)
        Round and client of accepted replies; of the last round they may be missing.
    clients : int
        Number of clients, all of which each round draws.

    Raises
    ------
    AssertionError
        If the log and ``metrics.jsonl`` disagree.
    """
    missing = []
    for line in lines:
        # The defence's quarantine counts as dropped too; the run without a network quarantines the same replies itself.
        number, dropped = line["round"], line["dropped"] - line["rejected"].get("quarantined", 0)
        if not dropped:
            continue
        silent = [(number, client) for client in range(clients) if (number, client) not in seen]
        assert len(silent) == dropped, f"round {number}: {dropped} replies are missing, the log lacks {silent}"
        missing += silent
    return missing


def reference(output: Path, data: Path, overrides: Sequence[str], missing: Sequence[Place]) -> str:
    """Return the SHA-256 of the model of the same run on the local engine, in which these requests fail."""
    from fedcross.client.app import app as honest
    from fedcross.conf.compose import join
    from fedcross.conf.schema import load
    from fedcross.engines.grid import LocalGrid
    from fedcross.server.session import Session
    from tests.support.federation import Quiet
    from tests.support.killer import digest

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            asked: dict[str, Any] = dict(message.content.config_records["config"])
            if (asked["round"], asked["client"]) in {*missing}:
                raise RuntimeError("lost")
        return honest(message, context)

    output.mkdir()
    before = {name: os.environ.get(name) for name in ("FEDCROSS_DATA", "FEDCROSS_STATE")}
    os.environ |= {"FEDCROSS_DATA": str(data), "FEDCROSS_STATE": str(output / "clients")}
    try:
        settled = [*overrides, f"output={output}"]
        Session(load(settled), LocalGrid(app, 3, {"overrides": join(settled)}), Quiet()).execute()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return digest(output)
