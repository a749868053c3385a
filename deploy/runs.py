"""Lists, stops and resumes the runs of a SuperLink, over its Control API."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError
from fedcross.core.settings import join, quote, split, unquote
from fedcross.deploy.control import Node, alive
from fedcross.engines import remote
from fedcross.engines.runs import Listed

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Stands for the newest run.
LAST = "last"
#: Most ended runs that `status` shows.
SHOWN = 10


def summary(address: str, nodes: Sequence[Node], runs: Sequence[Listed]) -> Iterator[str]:
    """Yield the lines of ``fedcross deploy status``: devices, then runs with the newest first."""
    known = alive(nodes)
    away = sum(node.status != "online" for node in known)
    yield f"SuperLink {address} answers"
    yield f"devices: {len(known)} registered, {len(known) - away} online, {len(nodes) - len(known)} revoked"
    for node in sorted(known, key=lambda node: (node.partition is None, node.partition or 0)):
        place = "no partition" if node.partition is None else f"partition {node.partition}"
        yield f"  {node.status:<12}  {node.fingerprint}  {place}"
    ended = Counter(run.status.partition(":")[2] or run.status for run in runs if run.over)
    counts = [f"{sum(not run.over for run in runs)} under way", *(f"{count} {how}" for how, count in ended.items())]
    yield f"runs: {', '.join(counts)}"
    for run in runs[:SHOWN]:
        reason = f"  {' '.join(run.details.split())[:120]}" if run.details else ""
        yield f"  {run.status:<18}  {run.run_id}  {folder(run) or '-'}  since {run.since[:19]}{reason}"


def continued(run: Listed, known: Sequence[Listed], more: Sequence[str]) -> list[str]:
    """Return the overrides with which the ended `run` goes on in its folder; `more` come last.

    Raises
    ------
    ConfigError
        If the run has not ended, names no folder, or another run writes into its folder.
    """
    place = folder(run)
    if place is None:
        raise ConfigError(f"run {run.run_id}: its settings name no folder, so this is no run of fedcross.")
    if busy := [one for one in known if not one.over and folder(one) == place]:
        raise ConfigError(f"run {busy[0].run_id}: it is {busy[0].status} and writes into {place}. Stop it first.")
    return [*(one for one in split(run.overrides) if not one.startswith("resume=")), *more, f"resume={quote(place)}"]


def resume(address: str, authority: str, overrides: Sequence[str], watch: bool) -> int:
    """Submit a run with `overrides` and return Flower's id of it; with `watch`, once it has completed."""
    params = remote.Params(address=address, authority=Path(authority))
    with tempfile.TemporaryDirectory(prefix="fedcross-") as work:
        return remote.submit(params, join(overrides), Path(work), watch=watch)


def folder(run: Listed) -> str | None:
    """Return the folder of a run, as the server sees it; None for a run of another app."""
    try:
        named = [one.split("=", 1)[1] for one in split(run.overrides) if one.startswith(("output=", "resume="))]
    except ConfigError:  # flwr run takes any text
        return None
    return unquote(named[-1]) if named else None


def chosen(known: Sequence[Listed], name: str) -> Listed:
    """Return the run that `name` names: its id, ``last``, or its folder or the last part of that.

    Of the runs in one folder the one that has not ended counts, otherwise the newest.

    Raises
    ------
    ConfigError
        If there is no such run, or runs in different folders have this name.
    """
    if found := known[:1] if name == LAST else [run for run in known if str(run.run_id) == name]:
        return found[0]
    found = [run for run in known if name in (place := folder(run) or "", PurePosixPath(place).name) and place]
    if not found:
        raise ConfigError(f"{name}: the SuperLink knows no such run. See fedcross deploy status.")
    if len({folder(run) for run in found}) > 1:
        raise ConfigError(f"{name}: runs in different folders have this name. Give the id or the whole folder.")
    return next((run for run in found if not run.over), found[0])
