"""``fedcross method=... task=...``: starts runs and sweeps from settings in Hydra's grammar."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcross.conf.compose import CONF, activate_plugins, compose
from fedcross.conf.shorthand import translated
from fedcross.core.errors import ConfigError, quoted
from fedcross.core.events import emit, structured
from fedcross.core.settings import quote, shown
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.command_line import check_plan, read_plan, single
from fedcross.server.interrupts import asked_to_end
from fedcross.server.launch import RunInterrupted
from fedcross.server.sweep import choices, job

INTERRUPTED, TERMINATED = 130, 143
#: fedcross's own flag: estimate the time of the command line without running it.
COST = "--cost"
#: Hydra's flags that only print something.
SHOWING = {"--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main(arguments: list[str]) -> int:
    """Start what `arguments` say; return 0, 130 for Ctrl-C or 143 for SIGTERM."""
    try:
        with asked_to_end() as asked:
            _start(arguments)
    except KeyboardInterrupt as stop:
        text = advice(stop, arguments)
        if structured():
            emit("run_interrupted", folder=str(getattr(stop, "folder", "")), text=text)
        else:
            print(f"\n{text}", file=sys.stderr)
        return TERMINATED if asked.is_set() else INTERRUPTED
    return 0


def _start(arguments: list[str]) -> None:
    """Run, sweep, estimate or show what `arguments` say."""
    flags = {a.split("=")[0] for a in arguments if a.startswith("-")}
    if flags & SHOWING:
        _show(arguments, flags)
        return
    plan = read_plan([a for a in arguments if a != COST])
    if COST in arguments:
        from fedcross.server.cost import show

        check_plan(plan)
        show(plan)
    elif not plan.multirun:
        _tell_next(single(plan.overrides), "result.json")
    else:
        check_plan(plan)
        folder = (plan.folder or Path()).resolve()
        _hydra([*plan.flags, *plan.overrides, f"hydra.sweep.dir={quote(str(folder))}"])
        if plan.search:
            _tell_best(folder)
        _tell_next(folder, "*/result.json")


def _show(arguments: list[str], flags: set[str]) -> None:
    """Let Hydra print the configuration or its own help."""
    if {"--cfg", "-c"} & flags:  # errors of Hydra would be tracebacks
        overrides = [a for a in arguments if not a.startswith("-") and "=" in a]
        if {"-m", "--multirun"} & flags or any(len(values) > 1 for values in choices(overrides).values()):
            raise ConfigError("--cfg shows the configuration of one run. Give each setting one value, without -m.")
        compose(overrides)
    _hydra(arguments)


def _hydra(arguments: Sequence[str]) -> None:
    """Run Hydra's own main, which starts the jobs of a sweep."""
    import hydra

    logging.getLogger("alembic").setLevel(logging.WARNING)  # of Optuna, which names each of its plug-ins
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors of fedcross pass through Hydra; the command prints them
    sys.argv = [sys.argv[0], *translated(arguments), *activate_plugins()]
    run: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    run()


def advice(stop: KeyboardInterrupt, arguments: list[str]) -> str:
    """Return how to go on after Ctrl-C."""
    if not isinstance(stop, RunInterrupted):
        return "Interrupted before a run had started."
    if {"-m", "--multirun"} & set(arguments) or (stop.folder.parent / "multirun.yaml").exists():
        return f"Interrupted. Continue the sweep with the same command and hydra.sweep.dir={shown(stop.folder.parent)}."
    if rounds := max(Checkpoints(stop.folder).rounds(), default=0):
        return f"Interrupted after round {rounds}. Continue it with: fedcross resume={shown(stop.folder)}"
    return f"Interrupted before the first checkpoint. Nothing of {stop.folder} can be continued: start again."


def _tell_next(folder: Path, results: str) -> None:
    """Print where the results are, the files `results` in `folder`, and what to do with them."""
    if not structured() and any(folder.glob(results)):
        print(f"folder {folder}. Next: fedcross report {quoted(folder)}", flush=True)


def _tell_best(folder: Path) -> None:
    """Print the best settings that a search has found."""
    import yaml

    path = folder / "optimization_results.yaml"
    if not structured() and path.exists():
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        best = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in found["best_params"].items()}
        settings = " ".join(f"{name}={value}" for name, value in best.items())
        print(f"Best of the study: {settings}, accuracy {found['best_value']:.4f}", flush=True)
