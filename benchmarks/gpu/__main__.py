"""The command line."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.expected import faults, notes, recorded
from benchmarks.gpu.items import ITEMS, LARGE, ROOT, START, begin, run_all
from benchmarks.gpu.machine import about, end_with_parent, ended_in_order, forget_site
from benchmarks.gpu.report import Found, Lines

#: For all items, unless ``--seconds`` says otherwise.
SECONDS = 480.0
#: For all items of ``--tiny`` on a GPU. On a CPU, which may be busy, that has no limit.
TINY_SECONDS = 90.0
#: Exit code if nothing can be measured.
REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments ask for.

    Returns
    -------
    int
        0 if everything asked for is in the report and as expected, 1 if not, 2 if nothing can be measured here.
    """
    chosen = _arguments(arguments)
    forget_site()
    if chosen.look or chosen.item or chosen.worker:
        return _inside(chosen)
    file, names = (
        chosen.output.absolute(),
        list(dict.fromkeys(chosen.only or _all(tiny=chosen.tiny))),
    )
    began = time.monotonic()
    try:
        here = look(chosen.device, chosen.seconds) | {"tiny": chosen.tiny}
        begin(names, file, here, anew=chosen.anew)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return REFUSED
    own = ["--device", here["device"], "--output", str(file), *(["--tiny"] if chosen.tiny else [])]

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu", *own, "--item", name]

    free = chosen.tiny and here["device"] == "cpu"
    seconds = TINY_SECONDS if chosen.tiny else SECONDS
    if chosen.seconds is not None or free:
        seconds = math.inf if chosen.seconds is None else chosen.seconds
    seconds -= time.monotonic() - began
    with ended_in_order():
        found = run_all(names, file, command, tiny=free, seconds=seconds)
    wrong = faults(found, names)
    print(*recorded(found), *notes(found), f"{file}: {len(wrong)} faults", *wrong, sep="\n", flush=True)
    return int(bool(wrong))


def _all(*, tiny: bool) -> list[str]:
    """Return the items of a call that names none, in their order."""
    return [item for item in ITEMS if not (tiny and item in LARGE)]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=list(ITEMS), help="an item; may be given several times")
    parser.add_argument("--anew", action="store_true", help="measure also what the report has already")
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:1, ..., or cpu")
    default = f"for everything; default: {SECONDS:g}, with --tiny {TINY_SECONDS:g}, on a CPU then without limit"
    parser.add_argument("--seconds", type=float, help=default)
    parser.add_argument("--tiny", action="store_true", help="one repetition of the smallest sizes: tries the program")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu.json"))
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def look(device: str, seconds: float | None = None) -> Found:
    """Return what a process of its own says about `device`, within `seconds` if that is less than :data:`items.START`.

    Raises
    ------
    ValueError
        If torch cannot use it here.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--look"]
    most = START if seconds is None else min(START, seconds)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=most)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"torch did not find a device within {most:g} seconds") from error
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"a process that looked for the device ended ({done.returncode})")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _inside(chosen: argparse.Namespace) -> int:
    """Look for the device, do the work of an item, or of a worker of the item ``processes``.

    Only these processes load torch.
    """
    end_with_parent()
    faulthandler.enable()
    from fedcross.core.errors import ConfigError

    if chosen.look:
        try:
            print(json.dumps(about(chosen.device)), flush=True)
        except ConfigError as error:
            print(error, file=sys.stderr, flush=True)
            return REFUSED
        return 0
    from benchmarks.gpu.place import Place
    from fedcross.client.device import pick_device

    place = Place(pick_device(chosen.device), chosen.tiny)
    if chosen.worker:
        from benchmarks.gpu.processes import work

        work(place)
        return 0
    limit = None if chosen.tiny and not place.gpu else ITEMS[chosen.item]
    importlib.import_module(f"benchmarks.gpu.{chosen.item}").measure(place, Lines(chosen.output, chosen.item, limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
