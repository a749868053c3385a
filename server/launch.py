"""One configuration, its engine, its folder: what a run is before its first round."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Where the user wants client states; each run's own folder unless set.
STATE = os.environ.get("FEDCROSS_STATE")


def launch(overrides: list[str], output: Path) -> Path:
    """Run one configuration with its engine and return the run's folder.

    `output` is where the run writes unless ``output=`` or ``resume=`` says otherwise.
    """
    from fedcross.conf.compose import join
    from fedcross.conf.schema import load, remarks
    from fedcross.core.paths import import_root
    from fedcross.engines.job import engine_of

    config = load(overrides)
    for remark in remarks(config):
        print(f"Note: {remark}", file=sys.stderr)
    folder = Path(config.resume or config.output or output).resolve()
    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    record(folder, settled)
    settled.append(f"output={quote(str(folder))}")
    engine = engine_of(config.module("engine"))
    if not engine.CAPABILITIES.own_folders:  # else every machine of the federation has its own
        settled.append(f"data_root={quote(str(Path(config.data_root).resolve()))}")
    if config.resume is not None:
        settled.append(f"resume={quote(str(folder))}")

    from fedcross.client.app import app as client_app
    from fedcross.client.app import together, warm_for
    from fedcross.engines.job import Job
    from fedcross.server.app import app as server_app

    os.environ["FEDCROSS_STATE"] = STATE or str(folder / "clients")
    data = config.load_data()  # before anything starts: what is wrong with the data is said here
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    text = join(settled)
    job = Job(text, clients, config.engine, server_app, client_app, import_root(), folder, warm_for(text), together)
    engine.run(job)
    return folder


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` as this run really uses them."""
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
