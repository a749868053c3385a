"""``fedcross record verify``: runs the first rounds of records again and compares them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import DataError
from fedcross.core.overrides import quote

if TYPE_CHECKING:
    from fedcross.analysis.runs import Run

GROUPS = ("task", "model", "partition", "method", "attack", "clock", "devices")
ROUNDS = 10
"""Up to which round records are run again."""


@dataclass(frozen=True)
class Compared:
    """What came of one record: the round that was compared, and a sentence; `same` is None if none was."""

    record: str
    round: int
    same: bool | None
    detail: str


def verify(table: Path, only: str = "", rounds: int = ROUNDS, data_root: Path | None = None) -> Iterator[Compared]:
    """Run the first rounds of the records of `table` again, and compare the digest of the model or the test accuracy.

    Parameters
    ----------
    table : Path
        ``results/TABLE``.
    only : str
        Name of one record; all if empty.
    rounds : int
        Most rounds to run. A record without digest or evaluation up to there is not compared.
    data_root : Path, optional
        Where the data sets are.

    Raises
    ------
    DataError
        If there is no such record.

    Notes
    -----
    Digests agree on the same processor and versions. Elsewhere the accuracy may differ by rounding: 0.02 is allowed.
    """
    from fedcross.analysis.frames import read_table

    runs = [run for run in read_table(table) if only in ("", run.path.name)]
    if not runs:
        raise DataError(f"{table}: no record {only!r}. The names are in {table / 'runs.jsonl'}.")
    for run in runs:
        yield _again(run, rounds, data_root)


def _again(run: Run, rounds: int, data_root: Path | None) -> Compared:
    from fedcross.server.app import untold
    from fedcross.server.launch import launch

    digests = {int(number): digest for number, digest in (run.info.get("digests") or {}).items()}
    near = [number for number in (*digests, *run.accuracy.index) if number <= rounds]
    last = max([number for number in near if number in digests], default=min(near, default=0))
    if not last:
        return Compared(run.path.name, 0, None, f"no digest and no evaluation up to round {rounds}; see --rounds")
    settings, unknown = overrides(run.settings)
    if unknown:
        return Compared(run.path.name, 0, None, f"settings of another version: {', '.join(unknown)}")
    every = f"evaluate_every={last}" if last in run.accuracy.index else "evaluate_every=1000000"
    where = [f"data_root={quote(str(data_root.resolve()))}"] if data_root else []
    with tempfile.TemporaryDirectory(prefix="fedcross-verify-") as place:
        folder = Path(place) / "run"
        more = [f"stop_at={last}", every, "checkpoint.every=1", "logger=none", f"output={quote(str(folder))}"]
        with untold():
            launch([*settings, *where, *more], folder)
        digest = {line["round"]: line["digest"] for line in _lines(folder / "digests.jsonl")}.get(last)
        line = next(one for one in _lines(folder / "metrics.jsonl") if one["round"] == last)
    if digests.get(last) == digest:
        return Compared(run.path.name, last, True, f"digest {digest[:12] if digest else ''} is equal")
    now, before = line.get("test_accuracy"), run.curve["accuracy"].get(last, math.nan)
    if now is None or math.isnan(before):
        return Compared(run.path.name, last, False, f"digest {str(digests.get(last))[:12]}, now {str(digest)[:12]}")
    return Compared(run.path.name, last, bool(abs(now - before) <= 0.02), f"accuracy {before:.4f}, now {now:.4f}")


def overrides(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return overrides that compose the dotted `settings` of a record, and those that this version does not know."""
    from fedcross.analysis.runs import flatten
    from fedcross.conf.compose import compose

    groups = [f"{group}={_name(group, settings)}" for group in GROUPS if f"{group}.name" in settings]
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


def _name(group: str, settings: Mapping[str, Any]) -> str:
    return str(settings.get(f"{group}.path") or settings[f"{group}.name"])


def literal(value: Any) -> str:
    """Return `value` in Hydra's grammar."""
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(literal, value)) + "]"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
