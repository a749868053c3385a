"""Starts Flower's programs of the server with holes of Flower closed; a script that needs Flower only.

SuperLink: a device announces a reply as a tree of object names. Flower's object store in memory keeps one list of
children per name and builds the tree from these lists again when the ServerApp asks. An announcement in which many
places share children grows on the way: 4 KiB with 16 levels become 9 MB, and each further level doubles that. A tree of
many thousand names keeps the database locked for seconds. So ``executor/announced.py`` looks at the tree before
anything is stored, ``executor/replies.py`` at the message itself, and ``executor/stored.py`` at each object, with
``executor/ledger.py``, which counts how much a device stores; ``executor/claims.py`` sees to it that what one device
says of an object binds no other and not the server. What is refused is not left open: ``executor/instead.py`` tells the
server. What is over is deleted by ``executor/sweep.py``, in small transactions, and large objects are stored one after
the other (``executor/turns.py``). A device that asks about a run gets no settings that are the server's alone
(``executor/told.py``). How often one asks is limited (``executor/share.py``), who waits is answered by turns
(``executor/fair.py``), who calls without end is sent away before Flower sees the call (``executor/door.py``), and what
a device writes into the log is short (``executor/lines.py``). Whoever starts and stops runs must have the operator's
token (``executor/operators.py``), devices come through the gateway, and a body is read only if the headers say that the
caller is known (``executor/entry.py``); a connection on which no request comes is closed (``executor/punctual.py``). Of
two keys that are registered for one partition at once, one gets it (``executor/admitted.py``). Keys that were revoked
stay so when the database is lost or an older copy takes its place (``executor/barred.py``).

SuperExec: a single status 500, which a busy SuperLink answers, ends it and with it the ServerApps that it started.
So :func:`outliving` asks again. It also starts every run at once, whatever memory there is: :func:`queued` lets runs
wait at the SuperLink, in the order in which they were submitted, while ``FEDCROSS_RUNS_AT_ONCE`` are on. And it starts
a process for each run that imports everything anew: ``executor/superexec.py`` gives runs to one that is ready. How a
run's process ended it does not say: ``executor/ended.py`` does. Two runs that start together may take each other's half
unpacked bundle: ``executor/whole.py`` unpacks it whole or not at all, here and on devices.

Only this file, those and ``executor/fleet.py`` change functions of Flower (``deploy/patience.py`` and
``executor/node.py`` change times that it waits). :data:`CHECKED` are the versions that they were compared with; with
another version the program starts as Flower made it, with a warning.

::

    python -P engines/guarded.py flower-superlink --host 127.0.0.1 ...
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points, version
from importlib.util import module_from_spec, spec_from_file_location
from logging import INFO, WARNING
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

#: The versions with which everything of fedcross that uses private parts of Flower was compared (this file, and
#: ``judged.py``, ``object_client.py``, ``flower.py``, ``grid.py``); ``executor/flower_runtime.py`` names their minor
#: numbers once more.
CHECKED = ("1.41.0", "1.42.0")
#: Most objects of a reply, unless the variable says otherwise. Over a network arrays travel packed, as pieces of 5 MiB:
#: a reply of 1 GiB has about 220 objects. Not packed (``federation.packed=false``), each array has two or more. Flower
#: takes about a millisecond for an object while the database is locked, and its other callers wait for 5 s.
MOST, VARIABLE = 2048, "FEDCROSS_REPLY_OBJECTS"
#: MiB of a device's replies to one run that may lie at the SuperLink, unless the variable says otherwise: a network of
#: 250 million float32 values.
MOST_MIB, MIB_VARIABLE = 1024, "FEDCROSS_REPLY_MIB"
#: Variable: how many ServerApps of one SuperExec run at once; not set: any number.
RUNS = "FEDCROSS_RUNS_AT_ONCE"
#: Pause between two questions of the SuperExec after an error: the first one and the longest one.
PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
#: Variable: whether a process is ready for the next run (``executor/ready.py``).
READY = "FEDCROSS_READY"
#: Variable: the file with the token that the gateway brings (``executor/entry.py``); not set: devices need no gateway.
GATEWAY = "FEDCROSS_GATEWAY_FILE"
SUPEREXEC = "flower-superexec"
#: Which the SuperExec starts for a run.
SERVERAPP = "flwr-serverapp"
#: Flower's own command line, whose calls to the SuperLink bring the operator's token (``executor/operators.py``).
FLWR = "flwr"
#: What is open in each program with a version of Flower that this file does not know.
OPEN = {
    "flower-superlink": "a registered device may take all memory of the SuperLink, and give orders to other devices; "
    "whoever reaches its port may start runs; an older copy of its database lets revoked keys in",
    SUPEREXEC: "an error of the SuperLink may end the SuperExec and its ServerApps",
    SERVERAPP: "a bundle that another run unpacks at the same time may be taken while it is half there",
    FLWR: "a SuperLink that asks for the operator's token refuses it",
}


def command(program: str) -> list[str]:
    """Return how to start Flower's `program`; its options follow."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), program]


def most_objects(text: str | None) -> int:
    """Return the most objects of a reply that the environment's `text` allows.

    Raises
    ------
    ValueError
        If `text` is no positive whole number.
    """
    return _count(text, VARIABLE, "objects may a reply have") or MOST


def most_mib(text: str | None) -> int:
    """Return how many MiB of a device's replies may lie at the SuperLink. Errors as :func:`most_objects`."""
    return _count(text, MIB_VARIABLE, "MiB may the replies of a device have") or MOST_MIB


def most_runs(text: str | None) -> int:
    """Return how many runs at once the environment's `text` allows; 0: any number. Errors as :func:`most_objects`."""
    return _count(text, RUNS, "runs may be on at once")


def _count(text: str | None, variable: str, what: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"{variable}={text}: how many {what}? Give a whole number above 0.")
    return int(text)


def outliving(acquire_task: Callable[..., Any], sleep: Callable[[float], object] = time.sleep) -> Callable[..., Any]:
    """Return Flower's call for the next task, which asks again after an error of the SuperLink itself (500 and up)."""
    import httpx
    from flwr.common.logger import log

    @functools.wraps(acquire_task)
    def call(*arguments: Any) -> Any:
        pause = PAUSE_S
        while True:
            try:
                return acquire_task(*arguments)
            except httpx.HTTPStatusError as error:
                if not error.response.is_server_error:
                    raise
                status = error.response.status_code
                log(WARNING, "fedcross: the SuperLink answered %s; the next question in %.0f s", status, pause)
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    return call


def children() -> int:
    """Return how many processes this one has started that have not ended; 0 on systems without ``/proc``."""
    own, found = str(os.getpid()), 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # it has just ended
            continue
        found += parent == own and state != "Z"
    return found


def queued(
    acquire_task: Callable[..., Any],
    most: int,
    running: Callable[[], int] = children,
    sleep: Callable[[float], object] = time.sleep,
) -> Callable[..., Any]:
    """Return Flower's call for the next task, which does not ask while `most` processes run: one ServerApp each."""
    from flwr.common.logger import log

    @functools.wraps(acquire_task)
    def call(*arguments: Any) -> Any:
        if running() >= most:
            log(INFO, "fedcross: %d runs are on (%s); further ones wait", most, RUNS)
            while running() >= most:
                sleep(PAUSE_S)
        return acquire_task(*arguments)

    return call


def guard(program: str, most: int, runs: int = 0, running: Callable[[], int] = children, mib: int = MOST_MIB) -> bool:
    """Replace functions of `program` in this process; return False if this is another version of Flower."""
    if version("flwr") not in CHECKED:
        return False
    if program == "flower-superlink":
        import uvicorn
        from flwr.superlink import extensions
        from flwr.superlink.servicer.control import control_handlers as control
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet
        from flwr.superlink.servicer.runtime import runtime_handlers as runtime

        announced, replies, ledgers = part("announced"), part("replies"), part("ledger")
        claims, sweep, told, turns, shares = map(part, ("claims", "sweep", "told", "turns", "share"))
        ledger, refused, in_turn = ledgers.Ledger(most, mib << 20), replies.Refusals(), turns.Turns()
        fleet.push_messages = announced.limited(fleet.push_messages, most, ledger, refused)
        within = part("stored").within(fleet.push_object, ledger, refused)
        fleet.push_object = replies.plain(within, refused, "object_id", "session_id")
        fleet.pull_object = replies.plain(fleet.pull_object, refused, "object_id")
        fleet.get_fab = replies.plain(fleet.get_fab, refused, "hash_str")
        fleet.get_run = told.without_the_servers(fleet.get_run)
        confirm = part("over").received(fleet.confirm_message_received)
        fleet.confirm_message_received = replies.plain(confirm, refused, "message_object_id")
        fleet.activate_node = replies.steady(fleet.activate_node, refused)
        fleet.send_node_heartbeat = replies.steady(fleet.send_node_heartbeat, refused)
        runtime.push_messages = claims.asserted(runtime.push_messages, ledger, refused)
        runtime.pull_messages = claims.named(runtime.pull_messages)
        control.register_node = part("admitted").one_key(control.register_node)
        working = ("pull_messages", "push_messages", "confirm_message_received", "get_run")
        few = ("activate_node", "deactivate_node", "send_node_heartbeat", *working)
        door, counted = part("door"), dict.fromkeys(few, shares.Share())
        counted["get_fab"] = shares.Share(shares.FABS, shares.FABS_BURST, what="calls for a run's program")
        strangers = shares.Share(shares.STRANGERS, shares.STRANGERS_BURST, what="calls under unknown keys")
        for name in (*few, "get_fab", "push_object", "pull_object"):
            asked = getattr(fleet, name)
            within = shares.within(asked, counted[name], strangers) if name in counted else asked
            setattr(fleet, name, door.proved(within))
        extensions.get_middleware = door.before(extensions.get_middleware, part("fair").Fair())
        operators, entry = part("operators"), part("entry")
        gateway, tasks = operators.token(os.environ, GATEWAY), entry.Tasks()
        runtime.acquire_task = tasks.given(runtime.acquire_task)
        extensions.get_middleware = entry.before(extensions.get_middleware, operators.token(os.environ), gateway, tasks)
        # Flower has no WebSockets; uvicorn would answer a request for one itself, before the door. Whose address a
        # gateway with a token names is the entry's affair.
        punctual, closing = part("punctual"), part("closing")
        for name in ("stream_logs", "stream_run_events"):
            setattr(control, name, closing.while_up(getattr(control, name)))
        uvicorn.Server.handle_exit = closing.noted(uvicorn.Server.handle_exit)  # type: ignore[method-assign]
        uvicorn.run = functools.partial(
            uvicorn.run,
            ws="none",
            http=punctual.Punctual,
            loop=punctual.loop,
            proxy_headers=not gateway,
            timeout_graceful_shutdown=closing.GRACE_S,
        )
        part("lines").attach()
        part("barred").attach()
        sweep.attach(sweep.Sweeper(turns=in_turn))
        turns.attach(in_turn)
    elif program == FLWR:
        part("operators").attach()
    elif program == SERVERAPP:
        part("whole").attach()
        part("serverapp").call_itself(SERVERAPP)  # as Flower's own script
    else:
        from flwr.supercore.runtime import RuntimeHttpClient

        asks = outliving(RuntimeHttpClient.AcquireTask)
        RuntimeHttpClient.AcquireTask = queued(asks, runs, running) if runs else asks  # type: ignore[method-assign]
    return True


def part(name: str) -> ModuleType:
    """Return a file of ``executor/``, which this script imports as that folder's own processes do."""
    found = spec_from_file_location("_fedcross_program", Path(__file__).resolve().parent / "executor" / "program.py")
    if found is None or found.loader is None:
        sys.exit("engines/executor: this part of fedcross is missing. Install fedcross again.")
    program = module_from_spec(found)
    found.loader.exec_module(program)
    module: ModuleType = program.load(name)
    return module


def become(program: str) -> NoReturn:
    """Run `program` in this process, guarded; its arguments are this process's."""
    ready: Any = None

    def running() -> int:
        return children() - (ready.held if ready else 0)

    try:
        most, runs = most_objects(os.environ.get(VARIABLE)), most_runs(os.environ.get(RUNS))
        mib = most_mib(os.environ.get(MIB_VARIABLE))
        part("operators").token(os.environ)
        part("operators").token(os.environ, GATEWAY)
        if program == SUPEREXEC and (way := part("ready").switch(os.environ.get(READY))) != "off":
            ready = part("superexec").keeper(way, lambda: not runs or running() < runs)
    except ValueError as error:
        sys.exit(str(error))
    [entry] = entry_points(group="console_scripts", name=program)
    start = entry.load()
    if not guard(program, most, runs, running, mib):
        other = f"this is flwr {version('flwr')} and not {' or '.join(CHECKED)}"
        print(f"fedcross: {program} starts unguarded, {other}: {OPEN[program]}.", file=sys.stderr, flush=True)
    elif program == SUPEREXEC:
        ended = part("ended").Ended()
        if ready is not None:
            part("superexec").attach(ready)
            ready.given = lambda process: ended.watch(process, "a run")
        part("ended").attach(ended, {SERVERAPP: command(SERVERAPP)})
    sys.exit(start())


def main() -> None:
    """Become the program that the first argument names."""
    sys.argv = sys.argv[1:]
    program = sys.argv[0] if sys.argv else ""
    if program not in OPEN:
        sys.exit(f"{program or 'nothing'}: start one of {', '.join(OPEN)}.")
    become(program)


if __name__ == "__main__":
    main()
