"""Starts one run: checks its configuration, data and folder, writes its settings and calls its engine."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.events import say
from fedcross.core.overrides import quote, shown
from fedcross.core.private_files import own_folder, write_atomically

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
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

    def advice(self) -> str:
        """Return how far the run came and how it goes on."""
        from fedcross.server.checkpoint import Checkpoints

        if rounds := max(Checkpoints(self.folder).rounds(), default=0):
            return f"Interrupted after round {rounds}. Continue it with: fedcross resume={shown(self.folder)}"
        return f"Interrupted before the first checkpoint. Nothing of {self.folder} can be continued: start again."


def launch(
    overrides: list[str], output: Path, *, claim: bool = True, numbered: bool = False, tell: bool = False
) -> Path:
    """Run one configuration with its engine and return the run's folder; nothing is written before all is checked.

    Parameters
    ----------
    overrides : list of str
        Settings of the run.
    output : Path
        The run's folder, unless ``output=`` or ``resume=`` sets another one.
    claim : bool
        Whether to lock the folder and refuse a used one; a sweep has done both for its jobs.
    numbered : bool
        Whether to add a number to the name of `output` if it holds a run.
    tell : bool
        Whether to print the device and the folder.
    """
    from fedcross.conf.cross_checks import remarks
    from fedcross.conf.schema import load
    from fedcross.server import announce
    from fedcross.server.run_folder import claimed, refuse_used, unused, written

    config = load(overrides)
    _warn(remarks(config))
    folder = Path(config.resume or config.output or output).resolve()
    if numbered and not (config.resume or config.output):
        folder = unused(folder)
    if claim and folder.exists():  # before the data are read
        with claimed(folder):
            if config.resume is None:
                refuse_used(folder)
    _check(config, folder)
    try:
        with claimed(folder) if claim else nullcontext():
            with written(folder, wait_s=SERVER_ENDS_S):
                pass  # no other server writes there
            if tell:
                say(announce.place(config, folder))
            _run(config, overrides, folder)
    except KeyboardInterrupt as stop:
        raise RunInterrupted(folder) from stop
    return folder


def _warn(remarks: list[str]) -> None:
    for remark in remarks:
        say(f"Note: {remark}", "WARNING")


def _own_folders(config: RunConfig) -> bool:
    """Return whether each machine of the federation has folders and devices of its own."""
    from fedcross.engines.job import engine_of

    return bool(engine_of(config.module("engine")).CAPABILITIES.own_folders)


def _check(config: RunConfig, folder: Path) -> None:
    """Check device, data, model and, of a resumed run, that it continues the one in `folder`."""
    from fedcross.client.device import pick_device
    from fedcross.server import announce, run_paths
    from fedcross.server.widths import check_run

    if config.device not in ("auto", "cpu") and not _own_folders(config):
        pick_device(config.device)
    run_paths.check_events(config)
    try:
        data = announce.read(config)
    except DataError as error:
        raise error if config.resume is None else run_paths.moved_data(config, error) from error
    count = 0 if data.partition.own else len(data.partition)
    if 0 < count < config.clients_per_round:
        raise ConfigError(f"clients_per_round={config.clients_per_round}: these data have {count} clients. Lower it.")
    _warn(_own_tests(config, data))
    network, _ = config.network(data.task)
    trained = sum(weight.numel() * weight.element_size() for weight in network.parameters() if weight.requires_grad)
    room = getattr(config.method, "room_remarks", None)
    _warn([*check_run(config, data.task, count), *(room(trained, count) if callable(room) else [])])
    if config.resume is not None:
        _check_continues(config, folder, data)


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
    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.identity import check_continues, check_data, digests_of
    from fedcross.server.run_folder import refuse_blocked

    done, _, identity = Checkpoints(folder).latest()
    check_continues(identity, config)
    if not _own_folders(config):  # otherwise the server's data lie in another folder
        check_data(identity.get("data"), digests_of(config, data))
    refuse_blocked(folder)
    if config.rounds < done:
        raise ConfigError(f"rounds={config.rounds}: the run in that folder has {done} already. Give {done} or more.")


def _run(config: RunConfig, overrides: list[str], folder: Path) -> None:
    """Write the run's settings into `folder` and start its engine."""
    from fedcross.client.app import app as client_app
    from fedcross.client.app import together, warm_for
    from fedcross.conf.compose import join
    from fedcross.core.paths import import_root
    from fedcross.core.site import device_name, gpus_for
    from fedcross.engines.job import Job, engine_of
    from fedcross.server import run_paths
    from fedcross.server.app import app as server_app

    paths = run_paths.paths_of(config, overrides)
    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    record(folder, settled)
    run_paths.write(folder, paths)
    absolute = {"output": str(folder)} | ({} if config.resume is None else {"resume": str(folder)})
    names = [run_paths.EVENTS] + ([] if _own_folders(config) else [run_paths.DATA])  # the server may run elsewhere
    absolute |= {name: paths[name] for name in names if name in paths}
    settled = [o for o in settled if run_paths.name_of(o) not in absolute]
    text = join([*settled, *(f"{name}={quote(path)}" for name, path in absolute.items())])
    os.environ["FEDCROSS_STATE"] = STATE or str(folder / "clients")
    data = config.load_data()
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    gpus, root = gpus_for(device_name(config.device)), import_root()
    job = Job(text, clients, config.engine, server_app, client_app, root, folder, warm_for(text), together, gpus)
    engine_of(config.module("engine")).run(job)


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` with the settings of the run."""
    from omegaconf import OmegaConf

    from fedcross.conf.compose import compose
    from fedcross.server.run_folder import writing

    with writing(folder / ".hydra"):
        own_folder(folder / ".hydra")
        for name, content in (("config", compose(overrides)), ("overrides", overrides)):
            write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(content)).encode())
