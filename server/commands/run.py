"""``fedcross method=... task=...``: starts runs and sweeps from settings in Hydra's grammar."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

from fedcross.core.errors import quoted
from fedcross.core.events import emit, structured
from fedcross.core.interrupts import asked_to_end

INTERRUPTED, TERMINATED = 130, 143
#: fedcross's own flag: estimate the time of the command line without running it.
COST = "--cost"
#: Hydra's flags that only print something.
HELP = {"--help", "-h"}
SHOWING = HELP | {"--hydra-help", "--cfg", "-c", "--info", "-i", "--version", "--shell-completion", "-sc"}


def main(arguments: list[str]) -> int:
    """Start a run or a sweep, or print help, as `arguments` say; return 0, 130 for Ctrl-C or 143 for SIGTERM."""
    try:
        with asked_to_end() as asked:
            _main(arguments)
    except KeyboardInterrupt as stop:
        advice = _advice(stop, arguments)
        if structured():
            emit("run_interrupted", folder=str(getattr(stop, "folder", "")), text=advice)
        else:
            print(f"\n{advice}", file=sys.stderr)
        return TERMINATED if asked.is_set() else INTERRUPTED
    return 0


def _advice(stop: KeyboardInterrupt, arguments: list[str]) -> str:
    """Return how to go on after Ctrl-C."""
    from fedcross.core.overrides import shown
    from fedcross.server.launch import RunInterrupted

    if not isinstance(stop, RunInterrupted):
        return "Interrupted before a run had started."
    if {"-m", "--multirun"} & set(arguments) or (stop.folder.parent / "multirun.yaml").exists():
        return f"Interrupted. Continue the sweep with the same command and hydra.sweep.dir={shown(stop.folder.parent)}."
    return stop.advice()


def _check_shown(arguments: list[str]) -> None:
    """Raise a ConfigError if ``--cfg`` cannot show the configuration; Hydra's own errors are tracebacks here."""
    from fedcross.conf.compose import compose
    from fedcross.core.errors import ConfigError
    from fedcross.server.sweep import choices

    overrides = [a for a in arguments if not a.startswith("-") and "=" in a]
    if {"-m", "--multirun"} & set(arguments) or any(len(values) > 1 for values in choices(overrides).values()):
        raise ConfigError("--cfg shows the configuration of one run. Give each setting one value, without -m.")
    compose(overrides)


def _tell_next(folder: Path, results: str) -> None:
    """Say where the results are, the files `results` in `folder`, and what to do with them."""
    if not structured() and any(folder.glob(results)):
        print(f"folder {folder}. Next: fedcross report {quoted(folder)}", flush=True)


def _main(arguments: list[str]) -> None:
    from fedcross.conf.compose import CONF, activate_plugins
    from fedcross.core.overrides import quote

    plugins = activate_plugins()
    cost, sweep = COST in arguments, None
    arguments = [a for a in arguments if a != COST]
    if not SHOWING & {a.split("=")[0] for a in arguments}:
        from fedcross.server.check import check_plan, read_plan

        plan = read_plan(arguments)
        if not cost and not plan.multirun and set(plan.flags) <= {"--run", "-r"}:
            from fedcross.server.jobs import single

            _tell_next(single(plan.overrides), "result.json")
            return
        check_plan(plan)
        if cost:
            from fedcross.server.cost import show

            show(plan)
            return
        arguments, sweep = [*plan.flags, *plan.overrides], plan.folder
        if sweep is not None and plan.multirun:  # else Hydra would look at the clock again, a second later
            arguments.append(f"hydra.sweep.dir={quote(str(sweep))}")
    elif {"--cfg", "-c"} & {a.split("=")[0] for a in arguments}:
        _check_shown(arguments)
    import hydra

    from fedcross.conf.own import translated
    from fedcross.server.jobs import failed, job

    failed.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors of fedcross pass through Hydra; main() prints them
    sys.argv = [sys.argv[0], *translated(arguments), *plugins]
    run: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    if HELP & set(arguments):
        from fedcross.server.commands.help_text import fitted

        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                run()  # ends with SystemExit
        finally:
            print(fitted(text.getvalue()), end="")
        return
    run()
    if sweep is not None:
        _tell_next(sweep.resolve(), "*/result.json")
