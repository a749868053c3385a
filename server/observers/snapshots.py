"""Snapshots: models of chosen rounds for the analyses.

``snapshots/round-000010-exchange-1.safetensors`` holds the accepted uploads of an exchange as ``SLOT/ENTRY``; its
header field ``uploads`` lists slot, client and number of examples. ``round-000010.safetensors`` is the global model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from fedcross.core.private_files import own_folder, write_atomically
from fedcross.server.observers import Observer
from fedcross.server.run_folder import writing
from fedcross.strategies.pool.pool import Arrays


class Snapshots(Observer):
    """Writes the models of `rounds` (from 1) into ``folder/snapshots``."""

    watches = frozenset({"uploads", "model"})

    def __init__(self, folder: Path, rounds: Collection[int]) -> None:
        self.folder = folder / "snapshots"
        self.rounds = frozenset(rounds)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write the uploads of an exchange, or the global model, of a chosen round."""
        number = fields["round"]
        if number not in self.rounds:
            return
        if event == "model":
            self._write(f"round-{number:06d}", fields["model"], {"round": str(number)})
        elif uploads := fields["uploads"]:
            arrays = {f"{one.slot}/{name}": array for one in uploads for name, array in one.arrays.items()}
            who = [{"slot": one.slot, "client": one.client, "num_examples": one.num_examples} for one in uploads]
            header = {"round": str(number), "exchange": str(fields["exchange"]), "uploads": json.dumps(who)}
            self._write(f"round-{number:06d}-exchange-{fields['exchange']}", arrays, header)

    def _write(self, name: str, arrays: Arrays, header: dict[str, str]) -> None:
        path = self.folder / f"{name}.safetensors"
        data = save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata=header)
        with writing(path):
            own_folder(self.folder)
            write_atomically(path, data)
