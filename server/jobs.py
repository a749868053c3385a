"""Runs one job of a sweep: skips a finished one, continues an interrupted one, never overwrites another configuration.

A job's folder is named by its settings, so the same command with the same ``hydra.sweep.dir`` continues a sweep, and
two such commands share the work. Hydra's parallel launchers import this module by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedcross.core.errors import ConfigError, counted
from fedcross.core.events import become_json, say, structured

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig


def folder_name(*, _root_: Any) -> str:
    """Return the name of a job's folder, for ``hydra.sweep.subdir``; `_root_` is Hydra's whole configuration."""
    from fedcross.server.sweep import applicable

    return job_name(applicable([str(o) for o in _root_.hydra.overrides.task]))


def job_name(overrides: Sequence[str]) -> str:
    """Return the name of the folder of the job that `overrides` describe."""
    from fedcross.conf.schema import load
    from fedcross.server.identity import fingerprint

    config = load(overrides)
    return f"{config.names['method']}-{config.names['task']}-seed{config.seed}-{fingerprint(config)}"


OmegaConf.register_new_resolver("fedcross_job", folder_name, replace=True)


def single(overrides: Sequence[str]) -> Path:
    """Print what `overrides` run, check it and run it, without Hydra's ``main``."""
    from fedcross.conf.compose import composed, is_hydras
    from fedcross.server.announce import announce
    from fedcross.server.command_line import check_job
    from fedcross.server.launch import launch

    with suppress(ConfigError):  # check_job names the faults
        if composed(overrides).log.format == "json":  # also where the resumed run says so
            become_json()
    check_job(overrides)
    announce(overrides)
    folder, chosen = folder_for(overrides)
    return launch([o for o in overrides if not is_hydras(o)], folder, numbered=not chosen, tell=True)


def folder_for(overrides: Sequence[str]) -> tuple[Path, bool]:
    """Return the folder of a run, and whether the user has chosen it."""
    from fedcross.conf.compose import composed, resolved
    from fedcross.server.run_folder import unused

    resume, output, default = resolved(composed(overrides), "resume", "output", "hydra.run.dir")
    if chosen := resume or output:
        return Path(str(chosen)).resolve(), True
    named = any(o.startswith("hydra.run.dir=") for o in overrides)
    folder = Path(str(default)).resolve()
    return (folder, True) if named else (unused(folder), False)


def job(_: Any) -> float | None:
    """Run one job for Hydra; return its validation accuracy, or else its test accuracy, for a search."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from fedcross.server.launch import launch

    state = HydraConfig.get()
    overrides, output = [str(o) for o in state.overrides.task], Path(state.runtime.output_dir)
    if state.mode == RunMode.MULTIRUN:
        sweep_job(overrides, output)
    else:
        launch(overrides, output)
    found = result_in(output)
    score = found.get("validation_accuracy", found.get("final_accuracy"))
    return None if score is None else float(score)


def sweep_job(overrides: Sequence[str], folder: Path) -> None:
    """Run the rounds of `overrides` that `folder` lacks; a ConfigError if it holds another configuration."""
    from fedcross.conf.schema import load
    from fedcross.core.overrides import quote
    from fedcross.server.announce import announce
    from fedcross.server.launch import SERVER_ENDS_S, launch
    from fedcross.server.run_folder import FolderInUseError, claimed, written
    from fedcross.server.sweep import applicable

    overrides = applicable(overrides)
    try:
        with claimed(folder):
            rounds, finished = progress(folder, load(overrides))
            if finished:
                tell(f"Already finished, {counted(rounds, 'round')}: {folder}")
                return
            if rounds:
                tell(f"Continued after round {rounds}: {folder}")
                overrides = [*overrides, f"resume={quote(str(folder))}"]
            else:
                with written(folder, wait_s=SERVER_ENDS_S):  # a server may still write whose command was killed
                    for name in ("metrics.jsonl", "audit.jsonl", "visits.jsonl", "requests.jsonl"):
                        (folder / name).unlink(missing_ok=True)
            announce(overrides)
            launch(overrides, folder, claim=False, tell=True)
    except FolderInUseError:
        tell(f"Already running in another process: {folder}")


def progress(folder: Path, config: RunConfig) -> tuple[int, bool]:
    """Return after which round `config` can go on in `folder`, and whether it has finished there.

    Raises
    ------
    ConfigError
        If another configuration lies in `folder`, or a run that was continued with other settings.
    """
    from fedcross.conf.schema import load
    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.identity import describe, differing, without_paths
    from fedcross.server.run_folder import saved_overrides

    checkpoints, result = Checkpoints(folder), result_in(folder)
    identity = checkpoints.identity()
    if identity is None and result:  # without checkpoints, the record says it
        identity = {"config": without_paths(describe(load(saved_overrides(folder))))}
    if identity is None:
        return 0, False
    if differs := differing(identity, config):
        facts = ", ".join(f"{name} {old!r}, now {new!r}" for name, (old, new) in differs.items())
        raise ConfigError(f"{folder}: another configuration is here ({facts}). Choose another hydra.sweep.dir.")
    rounds = int(result.get("rounds", 0))
    if rounds >= config.rounds or result.get("stopped"):
        return rounds, True
    return max(checkpoints.rounds(), default=0), False


def result_in(folder: Path) -> dict[str, Any]:
    """Return the content of ``result.json``; empty if there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def tell(text: str) -> None:
    """Print what becomes of a job: on stderr, or as an event."""
    if structured():
        say(text)
    else:
        print(text, file=sys.stderr)
