"""``fedcross record``: writes small records of runs into the repository, and runs their first rounds again."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedcross.analysis.records import read_table, record
from fedcross.analysis.runs import Run, flatten
from fedcross.conf.compose import compose
from fedcross.core.errors import DataError
from fedcross.core.settings import quote
from fedcross.server.launch import launch
from fedcross.server.run_folder import Lines

GROUPS = ("task", "model", "partition", "method", "objective", "attack", "clock", "devices")
#: Up to which round records are run again; by how much the accuracy may differ on another processor.
ROUNDS, TOLERANCE = 10, 0.02


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross record``; return the exit code (0, 1 if a record is not confirmed, or 2 for wrong use)."""
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:])
    line = argparse.ArgumentParser(
        prog="fedcross record",
        description="Write small records of finished runs into the repository.",
        epilog="fedcross record verify TABLE runs the first rounds of records again and compares.",
    )
    line.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders to search for runs")
    line.add_argument("--name", required=True, help="name of the table: a folder of RESULTS")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    options = line.parse_args(arguments)
    for note in record(options.folders, options.name, options.results):
        print(note, file=sys.stderr)
    print(options.results / options.name)
    return 0


def _verify(arguments: Sequence[str]) -> int:
    line = argparse.ArgumentParser(
        prog="fedcross record verify", description="Run the first rounds of recorded runs again and compare."
    )
    line.add_argument("table", metavar="TABLE", help="a folder of RESULTS")
    line.add_argument("--run", default="", metavar="NAME", help="one record of it (default: all)")
    line.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"most rounds (default: {ROUNDS})")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument("--data-root", type=Path, metavar="DIR", help="where the data sets are")
    options = line.parse_args(arguments)
    confirmed = True
    for one in verify(options.results / options.table, options.run, options.rounds, options.data_root):
        verdict = {True: "confirmed", False: "DIFFERS", None: "NOT COMPARED"}[one.same]
        print(f"{one.record}  round {one.round}  {verdict}  {one.detail}", flush=True)
        confirmed &= one.same is True
    return 0 if confirmed else 1


class Compared(NamedTuple):
    """What came of one record: the round that was compared, and a sentence; `same` is None if none was."""

    record: str
    round: int
    same: bool | None
    detail: str


def verify(table: Path, only: str = "", rounds: int = ROUNDS, data_root: Path | None = None) -> Iterator[Compared]:
    """Run the first rounds of the records of ``results/TABLE`` again; compare the model's digest or the test accuracy.

    `only` names one record. At most `rounds` rounds are run; a record without digest or evaluation up to there is not
    compared. Raises a DataError if there is no such record.
    """
    runs = [run for run in read_table(table) if only in ("", run.path.name)]
    if not runs:
        raise DataError(f"{table}: no record {only!r}. The names are in {table / 'runs.jsonl'}.")
    for run in runs:
        yield _again(run, rounds, data_root)


def _again(run: Run, rounds: int, data_root: Path | None) -> Compared:
    name = run.path.name
    digests = {int(n): digest for n, digest in (run.info.get("digests") or {}).items() if int(n) <= rounds}
    last = max(digests, default=min((number for number in run.accuracy.index if number <= rounds), default=0))
    if not last:
        return Compared(name, 0, None, f"no digest and no evaluation up to round {rounds}; see --rounds")
    settings, unknown = overrides(run.settings)
    if unknown:
        return Compared(name, 0, None, f"settings of another version: {', '.join(unknown)}")
    every = last if last in run.accuracy.index else 1_000_000
    where = [f"data_root={quote(str(data_root.resolve()))}"] if data_root else []
    with tempfile.TemporaryDirectory(prefix="fedcross-verify-") as place:
        folder = Path(place) / "run"
        more = [f"stop_at={last}", f"evaluate_every={every}", "checkpoint.every=1", "logger=none"]
        with contextlib.redirect_stdout(io.StringIO()):
            launch([*settings, *where, *more, f"output={quote(str(folder))}"], folder)
        digest = {one["round"]: one["digest"] for one in map(json.loads, Lines(folder / "digests.jsonl").read())}[last]
        found = json.loads(Lines(folder / "metrics.jsonl").read()[-1])["test_accuracy"]
    if digests.get(last) == digest:
        return Compared(name, last, True, f"digest {digest[:12]} is equal")
    before = run.curve["accuracy"].get(last, math.nan)
    if found is None or math.isnan(before):
        return Compared(name, last, False, f"digest {str(digests.get(last))[:12]}, now {digest[:12]}")
    return Compared(name, last, bool(abs(found - before) <= TOLERANCE), f"accuracy {before:.4f}, now {found:.4f}")


def overrides(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return overrides that compose the dotted `settings` of a record, and those that this version does not know."""
    chosen = {group: settings.get(f"{group}.path") or settings.get(f"{group}.name") for group in GROUPS}
    groups = [f"{group}={name}" for group, name in chosen.items() if name]
    known = flatten(compose(groups))
    named = {f"{group}.{key}" for group in GROUPS for key in ("name", "module", "path")} | {"logger.name"}
    found, unknown = [], []
    for name, value in settings.items():
        if name in named or name.startswith("engine.") or (name in known and known[name] == value):
            continue
        if name in known or any(key.startswith(f"{name}.") for key in known):
            found.append(f"++{name}={literal(value)}")
        elif value not in (None, False, (), "", 0):
            unknown.append(name)
    return [*groups, *found], unknown


def literal(value: Any) -> str:
    """Return `value` in Hydra's grammar."""
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(literal, value)) + "]"
    return quote(value) if isinstance(value, str) else json.dumps(value)
