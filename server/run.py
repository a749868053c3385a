"""The ``fedcross`` command: Hydra in front, one engine behind."""

from __future__ import annotations

import os
import sys
from typing import Any

from tasks.errors import ConfigError, FedcrossError

INTERRUPTED = 130
#: Ours: what the command line would take, without running it.
COST = "--cost"
#: Hydra's flags that show something and run nothing.
SHOWING = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version", "--shell-completion", "-sc"}


def main() -> None:
    """Run, sweep or explain, as Hydra's command line says. Exit code 2 for wrong use, 130 for Ctrl-C."""
    try:
        _main(sys.argv[1:])
    except KeyboardInterrupt:
        print(
            "\nInterrupted. The rounds done so far are on disk; continue with resume=RUN_FOLDER,\n"
            "a sweep with the same command and the same hydra.sweep.dir.",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output (a pager, head) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except FedcrossError as error:
        print(_told(error), file=sys.stderr)
        sys.exit(error.exit_code)


def _told(error: FedcrossError) -> str:
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        return "\n".join([f"{len(error.faults)} faults in the configuration:", *(f"  - {f}" for f in error.faults)])
    return str(error)


def _main(arguments: list[str]) -> None:
    from conf.compose import CONF, activate_plugins

    plugins = activate_plugins()
    cost = COST in arguments
    arguments = [a for a in arguments if a != COST]
    if not SHOWING & {a.split("=")[0] for a in arguments}:
        from server.check import checked_plan

        plan = checked_plan(arguments)
        if cost:
            from server.cost import show

            return show(plan)
        if not plan.multirun and set(plan.flags) <= {"--run", "-r"}:
            from server.jobs import single

            return single(plan.overrides)
        arguments = [*plan.flags, *plan.overrides]
    import hydra

    from server.jobs import job

    os.environ["HYDRA_FULL_ERROR"] = "1"  # our errors come out as they are; main() words them
    sys.argv = [sys.argv[0], *arguments, *plugins]
    run: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    run()
    return None


if __name__ == "__main__":
    main()
