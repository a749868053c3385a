"""Keeps models of chosen rounds for the analyses: every accepted upload of every exchange, and the global model.

``snapshots/round-000010-exchange-1.safetensors`` holds all uploaded models as ``SLOT/ENTRY``. The field ``uploads`` of
its header lists, for each slot, the client that trained the model and its number of examples.
``round-000010.safetensors`` is the
global model after that round.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import own_folder
from fedcross.server.accounting import write_atomically
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.wire.protocol import Round, Upload


class Snapshots:
    """Writes the models of `rounds` into ``folder/snapshots``; nothing if `rounds` is empty.

    Parameters
    ----------
    folder : Path
        The run's folder.
    rounds : collection of int
        Rounds to keep, from 1.
    """

    def __init__(self, folder: Path, rounds: Collection[int]) -> None:
        self.folder = folder / "snapshots"
        self.rounds = frozenset(rounds)

    def uploads(self, current: Round, uploads: Sequence[Upload]) -> None:
        """Write the uploads of one exchange, if its round is chosen."""
        if current.number not in self.rounds or not uploads:
            return
        arrays = {f"{u.slot}/{name}": array for u in uploads for name, array in u.arrays.items()}
        who = [{"slot": u.slot, "client": u.client, "num_examples": u.num_examples} for u in uploads]
        header = {"round": str(current.number), "exchange": str(current.exchange), "uploads": json.dumps(who)}
        self._write(f"round-{current.number:06d}-exchange-{current.exchange}", arrays, header)

    def model(self, number: int, arrays: Arrays) -> None:
        """Write the global model after round `number`, if that round is chosen."""
        if number in self.rounds:
            self._write(f"round-{number:06d}", arrays, {"round": str(number)})

    def _write(self, name: str, arrays: Arrays, header: dict[str, str]) -> None:
        path = self.folder / f"{name}.safetensors"
        data = save({key: np.asarray(array, order="C") for key, array in arrays.items()}, metadata=header)
        try:
            own_folder(self.folder)
            write_atomically(path, data)
        except OSError as error:
            raise StorageError(
                f"{path}: the snapshot cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error
