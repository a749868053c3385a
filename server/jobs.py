"""Runs one job of a sweep: skips a finished job, continues an interrupted one, never overwrites another configuration.

The name of a job's folder follows from its settings. So the same command with the same ``hydra.sweep.dir`` continues
a sweep, however it was stopped, and two such commands at the same time share the work. The processes of Hydra's
parallel launchers import this module by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import OmegaConf

from fedcross.core.errors import ConfigError, StorageError, counted
from fedcross.core.events import become_json, say, structured

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

Standing = Literal["new", "cut off", "done"]
#: What helps a sweep whose folder holds a run on other data.
ANOTHER = "Choose another hydra.sweep.dir, or say where the same data lie with data_root= or task.root=."
#: Digests of the data that finished jobs of this process are compared with, by the task's settings.
_digests: dict[str, dict[str, str]] = {}
#: Folders of jobs that have failed in this process's sweep: others with the same settings would fail as well.
failed: set[Path] = set()


def folder_name(*, _root_: Any) -> str:
    """Return the name of a job's folder, for ``hydra.sweep.subdir``; `_root_` is Hydra's whole configuration."""
    from fedcross.server.sweep import applicable

    return job_name(applicable([str(o) for o in _root_.hydra.overrides.task]))


def job_name(overrides: Sequence[str]) -> str:
    """Return the name of the folder of the job that `overrides` describe."""
    from fedcross.conf.schema import load
    from fedcross.server.identity import fingerprint

    config = load(overrides)
    method, task = config.names["method"], config.names["task"]
    return f"{method}-{task}-seed{config.seed}-{fingerprint(config)}"


OmegaConf.register_new_resolver("fedcross_job", folder_name, replace=True)


def single(overrides: Sequence[str]) -> Path:
    """Say what `overrides` run, check it, and run it; Hydra's own ``main`` would compose it twice more."""
    from fedcross.conf.compose import is_hydras, whole
    from fedcross.server.check import check_job
    from fedcross.server.launch import launch
    from fedcross.server.opening import announce

    try:
        folder, chosen = place(overrides)
    except ConfigError:
        check_job(overrides)  # tells this fault and all others
        raise
    if whole(overrides).log.format == "json":  # also where not the command line says so, but the run that goes on
        become_json()
    announce(overrides)
    check_job(overrides)
    return launch([o for o in overrides if not is_hydras(o)], folder, numbered=not chosen, tell=True)


def place(overrides: Sequence[str]) -> tuple[Path, bool]:
    """Return the folder of a run, and whether the user has chosen it."""
    from fedcross.conf.compose import run_folder, whole
    from fedcross.server.run_folder import free

    config = whole(overrides)
    if chosen := config.get("resume") or config.get("output"):
        return Path(str(chosen)).resolve(), True
    folder = run_folder(overrides)
    if any(o.startswith("hydra.run.dir=") for o in overrides):
        return folder.resolve(), True
    return free(folder.resolve()), False


def job(_: Any) -> None:
    """Run one job for Hydra."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from fedcross.server.launch import launch

    state = HydraConfig.get()
    overrides = [str(o) for o in state.overrides.task]
    output = Path(state.runtime.output_dir)
    if state.mode == RunMode.MULTIRUN:
        if output in failed:
            tell(f"Same settings as a job that failed above, not run again: {output}")
            return
        failed.add(output)
        sweep_job(overrides, output)
        failed.discard(output)
    else:
        launch(overrides, output)


def sweep_job(overrides: list[str], folder: Path) -> None:
    """Run the rounds of `overrides` that `folder` does not hold yet.

    Raises
    ------
    ConfigError
        If `folder` holds another configuration, or the same one on other data.
    """
    from fedcross.conf.schema import load
    from fedcross.server.launch import SERVER_ENDS_S, launch, quote
    from fedcross.server.opening import announce
    from fedcross.server.run_folder import FolderInUseError, claimed, written
    from fedcross.server.sweep import applicable

    overrides = applicable(overrides)
    config = load(overrides)
    try:
        with claimed(folder):
            found, rounds = standing(folder, config)
            if found == "done":
                _check_data(folder, config)
                tell(f"Already finished, {counted(rounds, 'round')}: {folder}")
                return
            if found == "cut off":
                tell(f"Continued after round {rounds}: {folder}")
                overrides = [*overrides, f"resume={quote(str(folder))}"]
            elif found == "new":
                with written(folder, wait_s=SERVER_ENDS_S):  # a server may be on whose command was killed
                    _clear(folder)
            announce(overrides)
            launch(overrides, folder, claim=False, tell=True)
    except FolderInUseError:
        tell(f"Already running in another process: {folder}")


def tell(text: str) -> None:
    """Say what becomes of a job, beside what the runs say: on stderr, or as an event."""
    if structured():
        say(text)
    else:
        print(text, file=sys.stderr)


def _clear(folder: Path) -> None:
    """Remove the files of a job that was interrupted before its first checkpoint, so that the job can start again."""
    import shutil

    from fedcross.server.audit import NAME as AUDIT
    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.request_log import NAME as REQUESTS
    from fedcross.server.visit_ledger import NAME as VISITS

    for name in ("metrics.jsonl", AUDIT, VISITS, REQUESTS):
        (folder / name).unlink(missing_ok=True)
    if not Checkpoints(folder).rounds():  # what a first checkpoint left that could not be written
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def standing(folder: Path, config: RunConfig) -> tuple[Standing, int]:
    """Return how far `config` has come in `folder`, and its last round there.

    A run is finished if it has ``rounds`` rounds or more. A larger ``rounds`` continues it.

    Raises
    ------
    ConfigError
        If another configuration lies in `folder`, or a run that was continued with other settings.
    """
    import json

    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.identity import changes, check_continues

    checkpoints = Checkpoints(folder)
    result = folder / "result.json"
    identity = checkpoints.identity()
    before = identity["config"] if identity else _recorded(folder) if result.exists() else None
    if before is None:
        return "new", 0
    try:
        check_continues({"config": before}, config)
    except ConfigError as error:
        advice = f"{folder}: another configuration is here. Choose another hydra.sweep.dir, or move the folder."
        raise ConfigError([advice, *error.faults]) from error
    if felt := changes(identity or {"config": before}, config, 0):
        names = ", ".join(sorted({str(one["setting"]) for one in felt}))
        raise ConfigError(
            f"{folder}: the run here was continued with other settings than this job's ({names}). Choose another "
            "hydra.sweep.dir, or move the folder."
        )
    try:
        rounds = int(json.loads(result.read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        rounds = 0
    if rounds >= config.rounds:
        return "done", rounds
    on_disk = checkpoints.rounds()
    return ("cut off", on_disk[-1]) if on_disk else ("new", 0)


def _check_data(folder: Path, config: RunConfig) -> None:
    """Raise a ConfigError if the finished run in `folder` has learned from other data than those of `config`.

    What one of both does not have is not compared: a run of an older version has no digests, the data of a finished run
    may be gone, and where each machine has a folder of its own the server's may lie elsewhere.
    """
    import json

    from fedcross.core.errors import DataError
    from fedcross.engines.job import engine_of
    from fedcross.server.identity import assigned, check_data
    from fedcross.tasks.data import digests

    try:
        before = json.loads((folder / "result.json").read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError, AttributeError):
        before = None
    if not before or engine_of(config.module("engine")).CAPABILITIES.own_folders:
        return
    task = f"{config.modules['task']} {config.task.model_dump_json()}"
    try:
        if task not in _digests:
            _digests[task] = digests(config.module("task").load(config.task))
    except (DataError, OSError):
        return
    try:
        check_data(before, _digests[task] | assigned(config), ANOTHER)
    except ConfigError as error:
        raise ConfigError([f"{folder}: a run of this configuration on other data is here.", *error.faults]) from error


def _recorded(folder: Path) -> dict[str, Any]:
    """Return the settings of a finished run without checkpoints, from its record."""
    from fedcross.conf.schema import load
    from fedcross.server.identity import describe
    from fedcross.server.run_folder import saved_overrides

    try:
        return describe(load(saved_overrides(folder)))
    except (StorageError, ConfigError) as error:
        raise ConfigError(
            f"{folder}: a result is here, but not its configuration ({error}). "
            "Choose another hydra.sweep.dir, or move the folder."
        ) from error
