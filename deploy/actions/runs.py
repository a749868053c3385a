"""``fedcross deploy runs``, ``status``, ``stop``, ``resume``, ``logs``: the runs of a SuperLink (its Control API)."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.overrides import join, quote, split, unquote
from fedcross.deploy import nodes
from fedcross.deploy.nodes import connect
from fedcross.engines import remote
from fedcross.engines import runs as control
from fedcross.engines.runs import Listed

#: Stands for the newest run.
LAST = "last"
#: Status of a run whose ServerApp no SuperExec has started yet.
PENDING = "pending"
#: Seconds after which the SuperLink knows that a run's server process has died: it waits a minute for a sign of life,
#: and one comes every half minute (``deploy/patience.py``).
NOTICED_S = 100.0
_AGAIN_S = 2.0


def show(arguments: argparse.Namespace) -> None:
    """List the runs that the SuperLink knows, the newest first."""
    with connect(*_where(arguments)) as client:
        for run in control.listing(client):
            reason = f"  {' '.join(run.details.split())[:120]}" if run.details else ""
            print(f"{run.run_id:>20}  {run.status:<18}  {run.since[:19]}  {folder(run) or '-'}{reason}")


def status(arguments: argparse.Namespace) -> None:
    """Print in a few lines how a federation is: its devices, the runs under way and how many have ended."""
    address, authority = _where(arguments)
    with connect(address, authority) as client:
        known, found = nodes.alive(nodes.listing(client)), control.listing(client)
    print("\n".join(summary(address, known, found)))


def summary(address: str, known: Sequence[nodes.Node], found: Sequence[Listed]) -> list[str]:
    """Return the lines of :func:`status`."""
    away = [node for node in known if node.status != "online"]
    unbound = [node for node in known if node.partition is None and nodes.bound(known)]
    count = f"devices: {len(known)} registered, {len(known) - len(away)} online"
    lines = [
        f"SuperLink {address} answers",
        f"{count}, {len(unbound)} without a partition" if unbound else count,
        *(
            f"  {node.status:<12}  {node.fingerprint}  {nodes.partition(node, nodes.bound(known))}"
            for node in known
            if node in away or node in unbound
        ),
    ]
    waiting = [run for run in reversed(found) if run.status == PENDING]  # as they will begin
    open_ones = [run for run in found if not run.over and run.status != PENDING]
    ended = Counter(run.status.partition(":")[2] or run.status for run in found if run.over)
    counts = [f"{len(open_ones)} under way", *([f"{len(waiting)} waiting"] if waiting else [])]
    lines.append(f"runs: {', '.join([*counts, *(f'{count} {how}' for how, count in sorted(ended.items()))])}")
    return lines + [
        f"  {run.status:<12}  {run.run_id}  {folder(run) or '-'}  since {run.since[:19]}"
        for run in (*open_ones, *waiting)
    ]


def stop(arguments: argparse.Namespace) -> None:
    """Stop runs; their checkpoints stay. One that cannot be stopped keeps none of the others from it.

    Raises
    ------
    ConfigError
        If the SuperLink knows one of them not, and nothing else is wrong.
    FederationError
        If any is over already, or is not stopped.
    """
    faults: list[ConfigError | FederationError] = []
    with connect(*_where(arguments)) as client:
        for name in arguments.runs:
            try:
                run = chosen(control.listing(client), name)
                if run.over:
                    raise FederationError(f"run {run.run_id}: it is over already ({run.status}).")
                control.stop(client, run.run_id)
            except (ConfigError, FederationError) as error:
                faults.append(error)
                continue
            print(f"run {run.run_id} is stopped, its ServerApp ends within a minute; to go on: resume {run.run_id}")
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise FederationError("\n".join(map(str, faults)))


def logs(arguments: argparse.Namespace) -> None:
    """Print a run's log; with ``--follow`` until the run has ended.

    Raises
    ------
    FederationError
        With ``--follow``, if the run does not complete.
    """
    with connect(*_where(arguments)) as client:
        run = chosen(control.listing(client), arguments.run)
        if not (arguments.follow or run.over):
            print(control.so_far(client, run.run_id), end="")
            return
        ended = control.follow(client, run.run_id, print)
        if arguments.follow and ended.status != "finished:completed":
            raise FederationError(f"run {ended.run_id} is {ended.status}. {ended.details}".rstrip())


def resume(arguments: argparse.Namespace) -> None:
    """Submit an ended run again, with the same settings, to go on from its newest checkpoint.

    Raises
    ------
    ConfigError
        If the run has not ended, or another one writes into its folder.
    """
    address, authority = _where(arguments)
    with connect(address, authority) as client:
        known = ended(lambda: control.listing(client), arguments.run)
    run = chosen(known, arguments.run)
    overrides = continued(run, known, arguments.settings)
    params = remote.Params(address=address, authority=authority)
    with tempfile.TemporaryDirectory(prefix="fedcross-") as work:
        new = remote.submit(params, join(overrides), Path(work), watch=not arguments.detach)
    print(f"run {run.run_id} {'goes on' if arguments.detach else 'went on'} as run {new}")


def ended(listing: Callable[[], list[Listed]], name: str) -> list[Listed]:
    """Return the runs as soon as the one that `name` names has ended, or after :data:`NOTICED_S` seconds.

    A run whose server process has just died is running for the SuperLink until it misses the next sign of life.
    """
    known = listing()
    run = chosen(known, name)
    deadline = time.monotonic() + NOTICED_S
    if not run.over:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + NOTICED_S))
        print(
            f"run {run.run_id}: the SuperLink takes it for {run.status}. If its server has died, the SuperLink notices "
            f"by {until}: waiting. (fedcross deploy stop {run.run_id} ends it at once.)",
            flush=True,
        )
    while not run.over and time.monotonic() < deadline:
        time.sleep(_AGAIN_S)
        known = listing()
        run = chosen(known, str(run.run_id))
    return known


def continued(run: Listed, known: list[Listed], more: list[str]) -> list[str]:
    """Return the overrides with which `run` goes on; `more` come last. A ``resume=`` there is its folder's new place.

    Raises
    ------
    ConfigError
        If that must not be.
    """
    if not run.over:
        raise ConfigError(
            f"run {run.run_id}: it is {run.status}. Stop it first (fedcross deploy stop {run.run_id}), or follow it "
            f"with fedcross deploy logs {run.run_id} --follow. A server that died in its first five minutes is "
            "noticed only after these: then stop the run."
        )
    place = folder(run)
    if place is None:
        raise ConfigError(f"run {run.run_id}: its settings name no folder, so this is no run of fedcross.")
    moved = [one for one in more if one.startswith("resume=")]
    if moved:
        place = unquote(moved[-1].removeprefix("resume="))
    if others := [other.run_id for other in known if not other.over and folder(other) == place]:
        raise ConfigError(f"run {run.run_id}: run {others[0]} writes into {place} now. Stop that one first.")
    left = ("resume=", "output=") if moved else ("resume=",)
    kept = [one for one in split(run.overrides) if not one.startswith(left)]
    return [*kept, *(one for one in more if one not in moved), f"resume={quote(place)}"]


def folder(run: Listed) -> str | None:
    """Return the folder of a run, as the server sees it; None if its settings name none, or are no text of ours."""
    try:
        given = split(run.overrides)
    except ConfigError:  # flwr run takes any text; one such run must not hide the others
        return None
    named = [o.split("=", 1)[1] for o in given if o.startswith(("output=", "resume="))]
    return unquote(named[-1]) if named else None


def chosen(known: list[Listed], name: str) -> Listed:
    """Return the run that `name` names: its id, ``last``, or its folder or the last part of that.

    A run that was resumed has its folder's name again, so of the runs in a folder one that has not ended counts, else
    the newest.

    Raises
    ------
    ConfigError
        If there is no such run, or runs in different folders have this name.
    """
    if found := known[:1] if name == LAST else [run for run in known if str(run.run_id) == name]:
        return found[0]
    found = [run for run in known if name and folder(run) == name.rstrip("/")]
    found = found or [run for run in known if name and PurePosixPath(folder(run) or "/").name == name]
    if not found:
        raise ConfigError(f"{name}: the SuperLink knows no such run. See fedcross deploy runs.")
    if others := [run for run in found if folder(run) != folder(found[0])]:
        raise ConfigError(
            f"{name}: runs {found[0].run_id} and {others[0].run_id} have this name, in {folder(found[0])} and "
            f"{folder(others[0])}. Give the id or the whole folder."
        )
    return next((run for run in found if not run.over), found[0])


def _where(arguments: argparse.Namespace) -> tuple[str, Path]:
    if not arguments.superlink or not arguments.authority:
        raise ConfigError("Which SuperLink? Give --superlink HOST:PORT and --authority ca.crt.")
    return arguments.superlink, Path(arguments.authority)
