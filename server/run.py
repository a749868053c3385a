"""The ``fedcross`` command: Hydra in front, one engine behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError, FedcrossError

INTERRUPTED = 130


def main() -> None:
    """Run, sweep or explain, as Hydra's command line says. Exit code 2 for wrong use, 130 for Ctrl-C."""
    try:
        sys.exit(_main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nInterrupted. The rounds done so far are on disk; continue with resume=RUN_FOLDER.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except FedcrossError as error:
        print(_told(error), file=sys.stderr)
        sys.exit(error.exit_code)


def _told(error: FedcrossError) -> str:
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        return "\n".join([f"{len(error.faults)} faults in the configuration:", *(f"  - {f}" for f in error.faults)])
    return str(error)


def _main(arguments: list[str]) -> int:
    import hydra
    from omegaconf import DictConfig

    from conf.compose import CONF, activate_plugins

    overrides = [a for a in arguments if not a.startswith("-")]
    plugins = activate_plugins()
    if not {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version"} & set(arguments):
        from server.check import check_overrides

        arguments = check_overrides(arguments, overrides)

    def job(_: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        state = HydraConfig.get()
        launch(list(state.overrides.task), Path(state.runtime.output_dir))

    sys.argv = [sys.argv[0], *arguments, *plugins]
    decorated: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
    os.environ["HYDRA_FULL_ERROR"] = "1"
    decorated()
    return 0


def launch(overrides: list[str], output: Path) -> None:
    """Run one configuration with its engine; `output` is where the run writes unless ``output=`` says otherwise."""
    from conf.compose import join, main_folder
    from conf.schema import load, remarks

    config = load(overrides)
    for remark in remarks(config):
        print(f"Note: {remark}", file=sys.stderr)
    folder = Path(config.resume or config.output or output).resolve()
    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root"}]
    settled += [f"output={_quote(str(folder))}", f"data_root={_quote(str(Path(config.data_root).resolve()))}"]

    from client.app import app as client_app
    from engines.job import Job
    from server.app import app as server_app

    os.environ.setdefault("FEDCROSS_STATE", str(folder / "clients"))
    clients = int(getattr(config.partition, "clients", config.clients_per_round))
    job = Job(join(settled), clients, config.engine, server_app, client_app, main_folder(), folder)
    config.module("engine").run(job)


def _quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    main()
