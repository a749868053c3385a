"""Observers that write files of a run: its visits, its requests to clients, and models of chosen rounds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log
from safetensors.numpy import save

from fedcross.core.files import dumps, own_folder, write_atomically
from fedcross.server.observers import Observer
from fedcross.server.run_folder import Lines, writing
from fedcross.strategies.pool.pool import Arrays


class Visits(Observer):
    """Writes the visits of an asynchronous run into ``visits.jsonl``, in the order in which they ended.

    Reports read it, and ``clock=replay clock.events=FILE`` repeats it. A line holds ``visit`` (number, from 0, in the
    order of dispatch), ``round`` and ``group`` (visits of a group end at once), ``slot``, ``client``, ``start`` and
    ``finish`` (seconds of the run's clock), ``accepted``, and ``staleness`` (uploads accepted during the visit). Lines
    of an earlier process stay up to the round `keep_until`, by which `finished` visits had ended.
    """

    watches = frozenset({"visit_ended"})
    file: Lines

    def __init__(self, folder: Path, keep_until: int = 0, finished: int = 0) -> None:
        self.file, self._kept = Lines(folder / "visits.jsonl"), list[str]()
        for line in self.file.read():
            with suppress(ValueError, TypeError, KeyError):
                if json.loads(line)["round"] <= keep_until:
                    self._kept.append(line)
        if len(self._kept) < finished:
            text = "%s: %d of %d visits are missing; this file cannot repeat the run. The model is not affected."
            log(WARNING, text, self.file.path, finished - len(self._kept), finished)

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        self.file.start(self._kept)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        self.file.add(dumps(fields), durable=False)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        self.file.add()


class Requests(Observer):
    """Writes every request of a run with privacy into ``requests.jsonl``, on disk before it is sent.

    An upload reveals something even if a crash undoes the round. `counts` are the requests to each client, `before`
    those that a resumed run's checkpoint counts; None for a new run.
    """

    watches = frozenset({"request"})
    file: Lines

    def __init__(self, folder: Path, before: Counter[int] | None = None) -> None:
        self.file, self.counts = Lines(folder / "requests.jsonl"), Counter[int]()
        for line in [] if before is None else self.file.read():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                self.counts[int(entry["client"])] = int(entry["requests"])
        self.counts |= before or Counter()  # the larger count of each client

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        self.file.start(map(self._line, self.counts))

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        self.counts[fields["client"]] += 1
        self.file.add(self._line(fields["client"]))

    def _line(self, client: int) -> str:
        return dumps({"client": client, "requests": self.counts[client]})


class Snapshots(Observer):
    """Writes the models of `rounds` (from 1) into ``folder/snapshots``, for the analyses.

    ``round-000010-exchange-1.safetensors`` holds the accepted uploads of an exchange as ``SLOT/ENTRY``; its header
    field ``uploads`` lists slot, client and number of examples. ``round-000010.safetensors`` is the global model.
    """

    watches = frozenset({"uploads", "model"})

    def __init__(self, folder: Path, rounds: Collection[int]) -> None:
        self.folder, self.rounds = folder / "snapshots", frozenset(rounds)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
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
