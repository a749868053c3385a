"""``python -m benchmarks QUESTION...``: measures, prints the tables and writes them into docs/performance.md."""

from __future__ import annotations

import argparse
from importlib import import_module

from benchmarks.harness import machine, markdown, write_section

QUESTIONS = {
    "engine": "a round of local training: fedcross against a textbook loop",
    "peers": "a round of FedAvg: fedcross against other frameworks",
    "aggregation": "FedCross's aggregation on the server against a plain loop",
    "wire": "what a round costs besides training, on every engine",
    "scaling": "time and memory by clients, clients drawn and model; a check for leaks",
}
"""Question -> what it measures; each is a module with ``measure(quick)``, a frame. ``benchmarks.gpu`` runs alone."""


def main() -> None:
    """Measure what the command line asks for."""
    described = "; ".join(f"{name}: {text}" for name, text in QUESTIONS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=described)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="default: all")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, seconds instead of minutes")
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    given = parser.parse_args()
    if unknown := set(given.questions) - set(QUESTIONS):
        parser.error(f"{min(unknown)}: no such question; there are {', '.join(QUESTIONS)}")
    for name in given.questions or QUESTIONS:
        table = markdown(import_module(f"benchmarks.{name}").measure(given.quick))
        text = f"`python -m benchmarks {name}`: {QUESTIONS[name]}. {machine()}\n\n{table}"
        print(text, flush=True)
        if not given.dry:
            write_section(name, text)


if __name__ == "__main__":
    main()
