"""The command line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.items import ITEMS, run_all
from benchmarks.gpu.report import Lines, faults, read, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments ask for; return the exit code, 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=list(ITEMS), help="an item; may be given several times")
    parser.add_argument("--device", default="auto", help="as the run's device: auto, cuda:1, cpu")
    parser.add_argument("--tiny", action="store_true", help="one repetition of the smallest sizes: tries the program")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu.json"))
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    file = chosen.output.absolute()
    if chosen.item or chosen.worker:
        return _inside(chosen.item, chosen.device, file, tiny=chosen.tiny)
    own = ["--device", chosen.device, "--output", str(file), *(["--tiny"] if chosen.tiny else [])]

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu", *own, "--item", name]

    found = faults(run_all(chosen.only or list(ITEMS), file, command, tiny=chosen.tiny))
    print(f"{file}: {len(found)} faults", *found, sep="\n", flush=True)
    return int(bool(found))


def _inside(item: str | None, device: str, file: Path, *, tiny: bool) -> int:
    """Do the work of one item, or of a worker of the item ``processes``; only these processes load torch."""
    import torch

    from benchmarks.gpu.place import Place
    from fedcross.client.device import pick_device

    place = Place(pick_device(device), tiny)
    if item is None:
        from benchmarks.gpu.processes import work

        work(place)
        return 0
    machine = torch.cuda.get_device_name(place.device) if place.gpu else "CPU"
    write(file, read(file) | {"machine": machine, "torch": torch.__version__})
    importlib.import_module(f"benchmarks.gpu.{item}").measure(place, Lines(file, item))
    return 0


if __name__ == "__main__":
    sys.exit(main())
