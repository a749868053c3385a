"""Prints the part of ``requirements.lock`` that a container needs, hashes included.

Uses only the standard library, because it runs before any package is installed.

::

    python deploy/requirements.py requirements.lock pyproject.toml --extra privacy --without ray matplotlib
    python deploy/requirements.py requirements.lock pyproject.toml --only hatchling

A package is kept if the project or a kept package needs it; uv's ``# via`` comments list which packages need it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Pin:
    """One locked package: its lines in the file, and the packages that need it."""

    text: str
    needed_by: frozenset[str]


def normal(name: str) -> str:
    """Return the comparable form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, Pin]:
    """Return the pins of a lock file by normalised name."""
    pins: dict[str, Pin] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        lines = block.splitlines()
        head = _NAME.match(lines[0])
        if head is None:
            continue
        comments = " ".join(line.strip().lstrip("#").strip() for line in lines if line.strip().startswith("#"))
        parents = frozenset(normal(name) for name in _NAME.findall(comments.removeprefix("via")))
        wanted = "\n".join(line for line in lines if not line.strip().startswith("#"))
        pins[normal(head[0])] = Pin(wanted, parents)
    return pins


def roots(project: Mapping[str, object], extras: Collection[str]) -> set[str]:
    """Return the names of the packages that ``pyproject.toml`` lists, with the given extras."""
    table = project["project"]
    if not isinstance(table, Mapping):
        raise SystemExit("pyproject.toml: no table [project].")
    optional = table.get("optional-dependencies", {})
    wanted = [*table.get("dependencies", ()), *(line for extra in extras for line in optional[extra])]
    return {normal(found[0]) for line in wanted if (found := _NAME.match(line))}


def select(pins: Mapping[str, Pin], start: Collection[str], without: Collection[str] = ()) -> list[str]:
    """Return the sorted names of `start` and of all packages that they need, leaving out `without`."""
    left_out = {normal(name) for name in without}
    kept = {name for name in map(normal, start) if name not in left_out}
    if missing := sorted(kept - pins.keys()):
        raise SystemExit(f"requirements.lock: no {', '.join(missing)} in it. Make it again with: make lock")
    while more := {
        name for name, pin in pins.items() if name not in kept and name not in left_out and pin.needed_by & kept
    }:
        kept |= more
    return sorted(kept)


def only_for_a_gpu(pins: Mapping[str, Pin]) -> set[str]:
    """Return the names of the packages that only a CUDA build of torch needs, and only with a GPU."""
    return {name for name in pins if name.startswith(("nvidia-", "cuda-")) or name == "triton"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the selected pins."""
    parser = argparse.ArgumentParser(description="Print the part of a lock file that is needed.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("project", type=Path)
    parser.add_argument(
        "--extra", action="append", default=[], help="include the packages of this extra of the project"
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="packages to leave out")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only these packages and those that they need"
    )
    parser.add_argument(
        "--without-gpu-except", nargs="*", metavar="NAME", help="leave out what only a GPU needs, except these packages"
    )
    arguments = parser.parse_args(argv)
    pins = read_lock(arguments.lock.read_text(encoding="utf-8"))
    project = tomllib.loads(arguments.project.read_text(encoding="utf-8"))
    start = arguments.only or roots(project, arguments.extra)
    without = {*arguments.without}
    if arguments.without_gpu_except is not None:
        without |= only_for_a_gpu(pins) - {normal(name) for name in arguments.without_gpu_except}
    print("\n".join(pins[name].text for name in select(pins, start, without)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
