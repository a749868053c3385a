"""Starts one run: checks its configuration, prepares its folder and calls its engine."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError
from fedcross.core.events import say
from fedcross.core.overrides import quote as quote
from fedcross.core.overrides import shown
from fedcross.core.private_files import own_folder, write_atomically

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.tasks.data import FederatedData

#: Seconds for which a run waits for the server of a run before it in its folder, whose command was killed, say.
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
        rounds = rounds_in(self.folder)
        if rounds == 0:
            return f"Interrupted before the first checkpoint. Nothing of {self.folder} can be continued: start again."
        return f"Interrupted after round {rounds}. Continue it with: fedcross resume={shown(self.folder)}"


def rounds_in(folder: Path) -> int:
    """Return the number of the last round that the run in `folder` can be continued after; 0 for none."""
    from fedcross.server.checkpoint import Checkpoints

    return max(Checkpoints(folder).rounds(), default=0)


def launch(
    overrides: list[str], output: Path, *, claim: bool = True, numbered: bool = False, tell: bool = False
) -> Path:
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
    tell : bool
        Whether to say which device it takes and where its folder is, as soon as it has that.
    """
    from fedcross.conf.cross_checks import remarks
    from fedcross.conf.schema import load
    from fedcross.engines.job import engine_of
    from fedcross.server import places
    from fedcross.server.opening import place
    from fedcross.server.run_folder import claimed, free, refuse_used, written

    config = load(overrides)
    for remark in remarks(config):
        say(f"Note: {remark}", "WARNING")
    if config.device not in ("auto", "cpu") and not engine_of(config.module("engine")).CAPABILITIES.own_folders:
        from fedcross.client.device import pick_device

        pick_device(config.device)
    if config.resume is None and config.output and claim:
        refuse_used(Path(config.output).resolve())  # before the data are read
    places.check_record(config)
    data = _data(config)
    _check_model(config, data)  # errors of data and model come before anything is written
    folder = Path(config.resume or config.output or output).resolve()
    if numbered and not (config.resume or config.output) and free(folder) != folder:
        folder = free(folder)
    rounds_before(config, folder, data, claim=False)  # before a lock lies in it
    try:
        with claimed(folder) if claim else nullcontext():
            if claim and config.resume is None:
                refuse_used(folder)
            with written(folder, wait_s=SERVER_ENDS_S):
                pass  # nobody else does
            if tell:
                say(place(config, folder))
            _run(config, overrides, folder)
    except KeyboardInterrupt as stop:
        raise RunInterrupted(folder) from stop
    return folder


def _data(config: RunConfig) -> FederatedData:
    """Read the data of `config`; if a resumed run's folder of data is missing, the error says how to name another."""
    from fedcross.core.errors import DataError
    from fedcross.server import places
    from fedcross.server.opening import read

    try:
        return read(config)
    except DataError as error:
        if config.resume is None:
            raise
        raise places.elsewhere(config, error) from error


def _check_model(config: RunConfig, data: FederatedData) -> None:
    """Refuse a model or a number of clients that does not fit the data, before the run has a folder."""
    from fedcross.server.slices import check_run

    count = 0 if data.partition.own else len(data.partition)
    if 0 < count < config.clients_per_round:
        raise ConfigError(f"clients_per_round={config.clients_per_round}: these data have {count} clients. Lower it.")
    remarks = _own_tests(config, data)
    network, _ = config.network(data.task)
    room = getattr(config.method, "room_remarks", None)
    trained = sum(weight.numel() * weight.element_size() for weight in network.parameters() if weight.requires_grad)
    remarks += [*check_run(config, network, data.task, count), *(room(trained, count) if callable(room) else [])]
    for remark in remarks:
        say(f"Note: {remark}", "WARNING")


def _own_tests(config: RunConfig, data: FederatedData) -> list[str]:
    """Return warnings about local accuracies that cannot be measured because no client has test examples of its own.

    Raises
    ------
    ConfigError
        If ``evaluate_clients`` would ask every client for what none has.
    """
    tests = data.partition.test
    if data.partition.own or (tests is not None and any(len(own) for own in tests)):
        return []
    none = f"partition={config.names['partition']} gives clients no test examples"
    if config.evaluate_clients:
        raise ConfigError(f"evaluate_clients=true: {none}. Turn it off, or choose one that does: partition=iid.")
    return [f"evaluate_local=true: {none}, so no local accuracy is measured."] if config.evaluate_local else []


def rounds_before(config: RunConfig, folder: Path, data: FederatedData | None = None, *, claim: bool = True) -> int:
    """Return how many rounds of the run `config` its `folder` holds, 0 for a new one; nothing there is changed.

    Refuses what :func:`launch` refuses before a run has written anything. `claim` says whether a new run may not have a
    used folder, as there. Without `data`, those of the run are not asked for.

    Raises
    ------
    ConfigError
        If `config` continues another run, or one on other data, or has fewer rounds than it, or `folder` is one of keys
        or used.
    StorageError
        If no checkpoint can be used, or a folder has the name of a file that the run must write.
    """
    from fedcross.server.run_folder import refuse_keys, refuse_used

    if config.resume is not None:
        refuse_keys(folder, "resume")
        return _check_continued(config, folder, data)
    refuse_keys(folder)
    if claim:
        refuse_used(folder)
    return 0


def _check_continued(config: RunConfig, folder: Path, data: FederatedData | None) -> int:
    """Return the rounds of the run in `folder`; raise an error if `config` on `data` does not continue it.

    Nothing there has been changed yet.

    The session finds the same faults, but only after the settings in the folder have been written anew.

    Raises
    ------
    ConfigError
        If `config` is another run's, or `data` are not those of the run.
    StorageError
        If no checkpoint can be used, or a folder has the name of a file that the run must write.
    """
    from fedcross.core.errors import StorageError
    from fedcross.engines.job import engine_of
    from fedcross.server.checkpoint import Checkpoints
    from fedcross.server.identity import check_continues, check_data, digests_of

    places = (folder, ".*"), (folder, "*.json*"), (folder, "*.safetensors*"), (folder / "checkpoints", "*")
    wrong = [path for place, names in places for path in place.glob(names) if path.is_dir() and path.name != ".hydra"]
    if wrong:
        raise StorageError(f"{wrong[0]}: a folder, where the run keeps a file or nothing. Move it away.")
    done, _, identity = Checkpoints(folder).latest()
    check_continues(identity, config)
    own = engine_of(config.module("engine")).CAPABILITIES.own_folders  # then the server's data lie where it says
    if data is not None and "data" in identity and not own:
        check_data(identity["data"], digests_of(config, data))
    if config.rounds < done:
        raise ConfigError(f"rounds={config.rounds}: the run in that folder has {done} already. Give {done} or more.")
    if config.rounds == done and not _evaluated(folder, done):
        raise ConfigError(
            f"rounds={done}: that round was not evaluated, for evaluate_every={config.evaluate_every}. Give more "
            "rounds; the last one always is."
        )
    return done


def _evaluated(folder: Path, number: int) -> bool:
    """Return whether the run in `folder` has the accuracy after round `number`, or no metrics of that round at all."""
    path = folder / "metrics.jsonl"
    for line in reversed(path.read_text(encoding="utf-8").splitlines() if path.exists() else []):
        try:
            entry = json.loads(line)
        except ValueError:  # cut off; the session says what is wrong
            continue
        if entry.get("round") == number:
            return entry.get("test_accuracy") is not None
    return True


def _run(config: RunConfig, overrides: list[str], folder: Path) -> None:
    """Write the run's settings into `folder` and start its engine."""
    from fedcross.client.app import app as client_app
    from fedcross.client.app import together, warm_for
    from fedcross.conf.compose import join
    from fedcross.core.paths import import_root
    from fedcross.core.site import device_name, gpus_for
    from fedcross.engines.job import Job, engine_of
    from fedcross.server import places
    from fedcross.server.app import app as server_app

    settled = [o for o in overrides if o.split("=")[0] not in {"output", "data_root", "resume"}]
    record(folder, settled)
    places.write(folder, places.of(config, overrides))
    if config.clock.events is not None:  # the server may run in another folder
        settled = [o for o in settled if places.name_of(o) != places.EVENTS]
        settled.append(f"{places.EVENTS}={quote(places.of(config, overrides)[places.EVENTS])}")
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
    gpus = gpus_for(device_name(config.device))
    root = import_root()
    engine.run(Job(text, clients, config.engine, server_app, client_app, root, folder, warm_for(text), together, gpus))


def record(folder: Path, overrides: list[str]) -> None:
    """Write ``.hydra/config.yaml`` and ``.hydra/overrides.yaml`` with the settings that this run uses.

    Each replaces the one of the run that is resumed only when all of it is on disk: nothing resumes a run without.

    Raises
    ------
    StorageError
        If they cannot be written.
    """
    from omegaconf import OmegaConf

    from fedcross.conf.compose import compose
    from fedcross.core.errors import StorageError

    try:
        own_folder(folder / ".hydra")
        for name, content in (("config", compose(overrides)), ("overrides", overrides)):
            write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(content)).encode())
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
