"""Starts one run: checks its configuration, data and folder, writes its settings and calls its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from fedcross.client.app import warm_for
from fedcross.client.device import pick_device
from fedcross.client.request import LocalClient
from fedcross.client.together import together
from fedcross.conf.compose import compose, join
from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import RunConfig, load
from fedcross.core.errors import ConfigError, DataError
from fedcross.core.events import say
from fedcross.core.files import own_folder, write_atomically
from fedcross.core.paths import import_root
from fedcross.core.settings import device_name, gpus_for, quote
from fedcross.engines.job import Job, engine_of
from fedcross.server.announce import place
from fedcross.server.app import app as server_app
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.identity import check_continues, check_data, digests_of
from fedcross.server.run_folder import claimed, refuse_used, writing, written
from fedcross.server.run_setup import check_run
from fedcross.strategies.round.clock import ReplayClock
from fedcross.tasks.data import FederatedData

#: Seconds for which a run waits for the previous server in its folder, whose command was killed, say.
SERVER_ENDS_S = 15.0
#: The user's folder for client states; if not set, each run keeps them in its own folder.
STATE = os.environ.get("FEDCROSS_STATE")


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or a notebook's stop button ended the run in `folder`; its finished rounds are on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the run in {folder} was interrupted")
        self.folder = folder


def launch(overrides: list[str], output: Path, *, claim: bool = True) -> Path:
    """Run one configuration with its engine and return the run's folder; nothing is written before all is checked.

    `output` is the folder unless ``output=`` or ``resume=`` sets another one. `claim`: lock the folder and refuse a
    used one; a sweep has done both for its jobs.
    """
    config = load(overrides)
    _warn(remarks(config))
    folder = Path(config.resume or config.output or output).resolve()
    if claim and folder.exists():  # before the data are read
        with claimed(folder):
            if config.resume is None:
                refuse_used(folder)
    _check(config, folder)
    try:
        with claimed(folder) if claim else nullcontext():
            with written(folder, wait_s=SERVER_ENDS_S):
                pass  # no other server writes there
            say(place(config, folder))
            _run(config, overrides, folder)
    except KeyboardInterrupt as stop:
        raise RunInterrupted(folder) from stop
    return folder


def _warn(remarks: Sequence[str]) -> None:
    for remark in remarks:
        say(f"Note: {remark}", "WARNING")


def _own_folders(config: RunConfig) -> bool:
    """Return whether each machine of the federation has folders and devices of its own."""
    return bool(engine_of(config.module("engine")).CAPABILITIES.own_folders)


def _check(config: RunConfig, folder: Path) -> None:
    """Check device, data, model and, of a resumed run, that it continues the one in `folder`."""
    if config.device not in ("auto", "cpu") and not _own_folders(config):
        pick_device(config.device)
    check_events(config)
    data = _read(config)
    count = 0 if data.partition.own else len(data.partition)
    if 0 < count < config.clients_per_round:
        raise ConfigError(f"clients_per_round={config.clients_per_round}: these data have {count} clients. Lower it.")
    _warn(_own_tests(config, data))
    config.network(data.task)
    _warn(check_run(config, data.task, count))
    if config.resume is not None:
        _check_continues(config, folder, data)


def check_events(config: RunConfig) -> None:
    """Raise a ConfigError if the record of visits of a replay has fewer visits, slots or clients than the run needs."""
    if config.clock.events is None:
        return
    visits, per_round = ReplayClock.read(Path(config.clock.events)).events, config.clients_per_round
    most = {"slot": per_round, "client": getattr(config.partition, "clients", None) or 1 << 31}
    too_high = any(visit.get(name, 0) >= limit for visit in visits.values() for name, limit in most.items())
    if too_high or len(visits) < min(config.rounds, config.stop_at or config.rounds) * per_round:
        raise ConfigError(
            f"clock.events={config.clock.events}: its {len(visits)} visits are of a run with other rounds, "
            "clients_per_round or partition.clients. Give those of the recorded run."
        )


def _read(config: RunConfig) -> FederatedData:
    """Read the data of `config`, and print so before and after."""
    say(f"Reading {config.names['task']} ...")
    try:
        data = config.load_data()
    except DataError as error:
        folder = Path(getattr(config.task, "root", config.data_root))
        if config.resume is None or folder.is_dir():
            raise
        name = "data_root" if folder == Path(config.data_root) else "task.root"
        raise DataError(f"{folder}: the data of this run are missing here. Name them: {name}=DIR. ({error})") from error
    parts = f"{len(data.task.train)} training examples over {len(data.partition)} clients"
    parts = "training examples on the devices" if data.partition.own else parts
    say(f"{parts}, {len(data.task.test)} test examples, {data.task.classes} classes")
    return data


def _own_tests(config: RunConfig, data: FederatedData) -> list[str]:
    """Return warnings about local accuracies that cannot be measured; a ConfigError for ``evaluate_clients``."""
    tests = data.partition.test
    if data.partition.own or (tests is not None and any(len(own) for own in tests)):
        return []
    none = f"partition={config.names['partition']} gives clients no test examples"
    if config.evaluate_clients:
        raise ConfigError(f"evaluate_clients=true: {none}. Turn it off, or choose one that does: partition=iid.")
    return [f"evaluate_local=true: {none}, so no local accuracy is measured."] if config.evaluate_local else []


def _check_continues(config: RunConfig, folder: Path, data: FederatedData) -> None:
    """Raise an error if `config` on `data` does not continue the run in `folder`; nothing has been changed yet."""
    done, _, identity = Checkpoints(folder).latest()
    check_continues(identity, config)
    if not _own_folders(config):  # otherwise the server's data lie in another folder
        check_data(identity.get("data"), digests_of(config, data))
    if config.rounds < done:
        raise ConfigError(f"rounds={config.rounds}: the run in that folder has {done} already. Give {done} or more.")


def _run(config: RunConfig, overrides: list[str], folder: Path) -> None:
    """Write the run's settings into `folder` and start its engine."""
    settings = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    paths = paths_of(config, overrides)
    record(folder, _with_paths(settings, paths))
    if _own_folders(config):  # the server and the devices have their own
        paths = {name: path for name, path in paths.items() if name == "clock.events"}
    paths |= {"output": str(folder)} | ({} if config.resume is None else {"resume": str(folder)})
    text = join(_with_paths(settings, paths))
    os.environ["FEDCROSS_STATE"] = STATE or str(folder / "clients")
    data = config.load_data()
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    gpus, root = gpus_for(device_name(config.device)), import_root()
    client, warm = LocalClient(text), warm_for(text)
    job = Job(text, clients, config.engine, server_app, client, root, folder, warm, together, gpus)
    engine_of(config.module("engine")).run(job)


def paths_of(config: RunConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return the absolute paths of a run by their settings; the task's folder only where `overrides` name it.

    With ``engine.authority``, on a network, the task's folder is one on every device and stays as it is.
    """
    authority = getattr(config.engine, "authority", None)
    found = {"data_root": config.data_root, "engine.authority": authority, "clock.events": config.clock.events}
    if authority is None and any(o.lstrip("+").startswith("task.root=") for o in overrides):
        found["task.root"] = getattr(config.task, "root", None)
    return {name: str(Path(path).expanduser().resolve()) for name, path in found.items() if path is not None}


def _with_paths(settings: Sequence[str], paths: Mapping[str, str]) -> list[str]:
    """Return `settings` with those `paths` in place of their own."""
    kept = [one for one in settings if one.lstrip("+").partition("=")[0] not in paths]
    return [*kept, *(f"{name}={quote(path)}" for name, path in paths.items())]


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` with the settings of the run."""
    with writing(folder / ".hydra"):
        own_folder(folder / ".hydra")
        for name, content in (("config", compose(overrides)), ("overrides", overrides)):
            write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(content)).encode())
