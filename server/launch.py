"""Starts one run: checks its configuration, prepares its folder and calls its engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: The user's folder for client states; if not set, each run keeps them in its own folder.
STATE = os.environ.get("FEDCROSS_STATE")


def launch(overrides: list[str], output: Path, *, claim: bool = True, numbered: bool = False) -> Path:
    """Run one configuration with its engine and return the run's folder.

    Checks the settings, the data and that no other run uses the folder, before it writes anything.

    Parameters
    ----------
    overrides : list of str
        Settings of the run.
    output : Path
        The run's folder, unless ``output=`` or ``resume=`` sets another one.
    claim : bool
        Whether to lock the folder and refuse a used one. A sweep has already done both for its jobs.
    numbered : bool
        Whether to add a number to the name of `output` if it already holds a run; for names that no user chose.
    """
    from fedcross.conf.schema import load, remarks
    from fedcross.engines.job import engine_of
    from fedcross.server.run_folder import claimed, free, refuse_used

    config = load(overrides)
    for remark in remarks(config):
        print(f"Note: {remark}", file=sys.stderr)
    if config.device not in ("auto", "cpu") and not engine_of(config.module("engine")).CAPABILITIES.own_folders:
        from fedcross.client.workshop import pick_device

        pick_device(config.device)
    data = config.load_data()  # raises errors of the data before the run starts
    if config.train.only or config.modules["model"] == "own":
        config.network(data.task)  # the same for a network of the user's own, and for patterns that match nothing
    if config.resume is not None:
        folder = Path(config.resume).resolve()
        _check_continued(config, folder)
    else:
        folder = Path(config.output or output).resolve()
        if numbered and not config.output:
            folder = free(folder)
    if not claim:
        _run(config, overrides, folder)
        return folder
    with claimed(folder):
        if config.resume is None:
            refuse_used(folder)
        _run(config, overrides, folder)
    return folder


def _check_continued(config: RunConfig, folder: Path) -> None:
    """Raise a ConfigError if `config` does not describe the run in `folder`."""
    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.identity import check_same, describe
    from fedcross.strategies.round.registry import method_class

    identity = Checkpoints(folder).identity()
    if identity is not None:  # otherwise the session raises the error
        check_same(identity["config"], describe(config), method_class(config.modules["method"]).may_change)


def _run(config: RunConfig, overrides: list[str], folder: Path) -> None:
    """Write the run's settings into `folder` and start its engine."""
    from fedcross.client.app import app as client_app
    from fedcross.client.app import together, warm_for
    from fedcross.conf.compose import join
    from fedcross.core.paths import import_root
    from fedcross.engines.job import Job, engine_of
    from fedcross.server.app import app as server_app

    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    record(folder, settled)
    settled.append(f"output={quote(str(folder))}")
    engine = engine_of(config.module("engine"))
    if not engine.CAPABILITIES.own_folders:  # otherwise each machine of the federation has its own
        settled.append(f"data_root={quote(str(Path(config.data_root).resolve()))}")
    if config.resume is not None:
        settled.append(f"resume={quote(str(folder))}")
    os.environ["FEDCROSS_STATE"] = STATE or str(folder / "clients")
    data = config.load_data()
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    text = join(settled)
    job = Job(text, clients, config.engine, server_app, client_app, import_root(), folder, warm_for(text), together)
    engine.run(job)


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` with the settings that this run uses."""
    from omegaconf import OmegaConf

    from fedcross.conf.compose import compose
    from fedcross.core.errors import StorageError

    try:
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(compose(overrides)), folder / ".hydra" / "config.yaml")
        OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error


def quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
