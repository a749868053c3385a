"""One job of a sweep: skipped if it is done, continued if it was cut off, never over another configuration.

A job's folder is found by its settings, so the same command with the same ``hydra.sweep.dir`` continues a sweep,
however it was stopped, and two of them side by side share the work. This module is imported by name in the processes
of Hydra's parallel launchers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import OmegaConf

from tasks.errors import ConfigError

if TYPE_CHECKING:
    from conf.schema import RunConfig

Standing = Literal["new", "cut off", "done"]


def folder_name(*, _root_: Any) -> str:
    """Return the name of a job's folder, for ``hydra.sweep.subdir``; `_root_` is Hydra's whole configuration."""
    from conf.schema import load
    from server.session import fingerprint
    from server.sweep import applicable

    config = load(applicable([str(o) for o in _root_.hydra.overrides.task]))
    method, task = config.names["method"], config.names["task"]
    return f"{method}-{task}-seed{config.seed}-{fingerprint(config)}"


OmegaConf.register_new_resolver("fedcross_job", folder_name, replace=True)


def single(overrides: Sequence[str]) -> None:
    """Run one configuration as Hydra's own ``main`` would, on the composition that the check has made.

    Hydra composes twice before it calls a job; what it does around the job (folder, logging, callbacks, environment)
    is its own :func:`hydra.core.utils.run_job`.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.utils import configure_log, run_job
    from hydra.types import HydraContext, RunMode

    from conf.compose import whole

    config = whole(overrides)
    config.hydra.mode = RunMode.RUN
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name="config")
    context = HydraContext(config_loader=ConfigLoaderImpl(ConfigSearchPathImpl()), callbacks=callbacks)
    done = run_job(job, config, "hydra.run.dir", None, context)
    callbacks.on_run_end(config=config, config_name="config", job_return=done)
    _ = done.return_value  # raises what the job raised


def job(_: Any) -> None:
    """Run one job of Hydra's."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from server.launch import launch

    state = HydraConfig.get()
    overrides = [str(o) for o in state.overrides.task]
    output = Path(state.runtime.output_dir)
    if state.mode == RunMode.MULTIRUN:
        sweep_job(overrides, output)
    else:
        launch(overrides, output)


def sweep_job(overrides: list[str], folder: Path) -> None:
    """Run `overrides` in `folder` as far as they have not been run there.

    Raises
    ------
    ConfigError
        If another configuration lies in `folder`.
    """
    from filelock import FileLock, Timeout

    from conf.schema import load
    from server.launch import launch, quote
    from server.sweep import applicable

    overrides = applicable(overrides)
    config = load(overrides)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            found, rounds = standing(folder, config)
            if found == "done":
                print(f"Done already, {rounds} rounds: {folder}", file=sys.stderr)
                return
            if found == "cut off":
                print(f"Continued after round {rounds}: {folder}", file=sys.stderr)
                overrides = [*overrides, f"resume={quote(str(folder))}"]
            launch(overrides, folder)
    except Timeout:
        print(f"Runs in another process already: {folder}", file=sys.stderr)


def standing(folder: Path, config: RunConfig) -> tuple[Standing, int]:
    """Return how far `config` has come in `folder`, and its last round there.

    A run is done with ``rounds`` rounds or more; asked for more, it is continued.

    Raises
    ------
    ConfigError
        If another configuration lies in `folder`.
    """
    import json

    from server.checkpoint import Checkpoints
    from server.session import check_same, describe
    from strategies.registry import method_class

    checkpoints = Checkpoints(folder)
    result = folder / "result.json"
    identity = checkpoints.identity()
    before = identity["config"] if identity else _recorded(folder) if result.exists() else None
    if before is None:
        return "new", 0
    try:
        check_same(before, describe(config), method_class(config.modules["method"]).may_change)
    except ConfigError as error:
        advice = f"{folder}: another configuration lies here. Choose another hydra.sweep.dir, or move it away."
        raise ConfigError([advice, *error.faults]) from error
    try:
        rounds = int(json.loads(result.read_text())["rounds"])
    except (OSError, ValueError, KeyError):
        rounds = 0
    if rounds >= config.rounds:
        return "done", rounds
    on_disk = checkpoints.rounds()
    return ("cut off", on_disk[-1]) if on_disk else ("new", 0)


def _recorded(folder: Path) -> dict[str, Any]:
    """Return the settings of a finished run without checkpoints, from its record."""
    from conf.schema import load
    from server.session import describe

    path = folder / ".hydra" / "overrides.yaml"
    try:
        return describe(load([str(o) for o in OmegaConf.load(path)]))
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"{folder}: a result lies here, but not which configuration it is of ({error}). "
            "Choose another hydra.sweep.dir, or move it away."
        ) from error
