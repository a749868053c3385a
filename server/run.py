"""The ``fedcross`` command: Hydra in front, one engine behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError, FedcrossError

INTERRUPTED = 130
#: Ours: what the command line would take, without running it.
COST = "--cost"
#: Where the user wants client states; each run's own folder unless set.
STATE = os.environ.get("FEDCROSS_STATE")
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
    import hydra

    from conf.compose import CONF, activate_plugins
    from server.jobs import job

    plugins = activate_plugins()
    cost = COST in arguments
    arguments = [a for a in arguments if a != COST]
    if not SHOWING & {a.split("=")[0] for a in arguments}:
        from server.check import checked_plan

        plan = checked_plan(arguments)
        if cost:
            from server.cost import show

            return show(plan)
        arguments = [*plan.flags, *plan.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # our errors come out as they are; main() words them
    sys.argv = [sys.argv[0], *arguments, *plugins]
    run: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    run()
    return None


def launch(overrides: list[str], output: Path) -> Path:
    """Run one configuration with its engine and return the run's folder.

    `output` is where the run writes unless ``output=`` or ``resume=`` says otherwise.
    """
    from conf.compose import join, main_folder
    from conf.schema import load, remarks

    config = load(overrides)
    for remark in remarks(config):
        print(f"Note: {remark}", file=sys.stderr)
    folder = Path(config.resume or config.output or output).resolve()
    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    record(folder, settled)
    settled.append(f"output={quote(str(folder))}")
    engine = config.module("engine")
    if not getattr(engine, "OWN_FOLDERS", False):  # else every machine of the federation has its own
        settled.append(f"data_root={quote(str(Path(config.data_root).resolve()))}")
    if config.resume is not None:
        settled.append(f"resume={quote(str(folder))}")

    from client.app import app as client_app
    from client.app import together, warm_for
    from client.data import load as load_data
    from engines.job import Job
    from server.app import app as server_app

    os.environ["FEDCROSS_STATE"] = STATE or str(folder / "clients")
    data = load_data(config)  # before anything starts: what is wrong with the data is said here
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    text = join(settled)
    job = Job(text, clients, config.engine, server_app, client_app, main_folder(), folder, warm_for(text), together)
    engine.run(job)
    return folder


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` as this run really uses them."""
    from omegaconf import OmegaConf

    from conf.compose import compose
    from tasks.errors import StorageError

    try:
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(compose(overrides)), folder / ".hydra" / "config.yaml")
        OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error


def quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    main()
