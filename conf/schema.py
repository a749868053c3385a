"""The typed configuration of a run; all of it is checked before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, field_validator

from fedcross.conf.compose import compose, environment, split
from fedcross.conf.cross_checks import cross_faults
from fedcross.core.errors import ConfigError
from fedcross.core.settings import DEVICE_NAMES, Settings, find, parse
from fedcross.strategies.filters.compression import Compression
from fedcross.strategies.filters.defence import Defence
from fedcross.strategies.round.clock import ClockSettings, Devices
from fedcross.strategies.round.settings import AverageSettings, FederationSettings

if TYPE_CHECKING:
    from torch import nn

    from fedcross.strategies.method import Method
    from fedcross.strategies.objective import Objective
    from fedcross.tasks.base import Task
    from fedcross.tasks.data import FederatedData
    from fedcross.tasks.models.width import Corners, Width

#: Configuration group -> package that holds its modules.
PACKAGES = {
    "task": "fedcross.tasks",
    "model": "fedcross.tasks.models",
    "partition": "fedcross.tasks.partition",
    "method": "fedcross.strategies",
    "objective": "fedcross.strategies",
    "engine": "fedcross.engines",
}

#: Settings of the server only; a client's configuration does not contain them.
SERVER_ONLY = {"output", "resume", "stop_at", "stop", "logger", "log", "serve", "checkpoint", "snapshots", "engine"}
SERVER_ONLY |= {"defence", "clock", "devices", "average", "average_decay", "average_from"}


class Train(Settings):
    """The client's optimiser. `lr` is per step, `epochs` are passes, `batch` counts examples.

    `momentum` is SGD's, `betas` and `eps` are Adam's and AdamW's; weight decay is decoupled in AdamW alone.
    `compile` compiles the step with torch (:mod:`client.trainer`).
    `clip` is the largest Euclidean norm of a step's gradient, including the method's correction. `examples` is the
    largest number of a client's examples per visit, drawn anew each round. `precision` is that of the network's
    arithmetic; weights and optimiser are float32. `only` are shell patterns for names of the model: nothing else is
    trained, sent or stored (:mod:`tasks.models.part`); `base` is a safetensors file in ``data_root`` with the rest.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(gt=0)
    lr_decay: float = Field(1.0, gt=0, le=1)
    lr_min: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float | None = Field(None, gt=0)
    epochs: int = Field(ge=1)
    batch: int = Field(ge=1)
    examples: int | None = Field(None, ge=1)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    deterministic: bool = False
    compile: Literal["auto"] | bool = "auto"
    only: tuple[str, ...] = ()
    base: str | None = None
    base_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    @field_validator("only", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """Take one pattern for a list of one, and null for none."""
        return [] if value is None else [value] if isinstance(value, str) else value


class StopSettings(Settings):
    """When a run ends before its last round (:mod:`server.metrics`).

    `metric` is a column of ``metrics.jsonl``; null: ``validation_accuracy`` if the task has a validation part, else
    ``test_accuracy``. The run ends after `patience` evaluations without a new best value, or once `target` is reached.
    """

    metric: str | None = Field(None, min_length=1)
    patience: int | None = Field(None, ge=1)
    target: float | None = None


class CheckpointSettings(Settings):
    """Which checkpoints are kept, and whether each accepted reply is stored at once (:mod:`server.reply_log`)."""

    every: int = Field(1, ge=1)
    keep: int = Field(2, ge=1)
    milestone: int = Field(0, ge=0)
    log: Literal["auto"] | bool = "auto"


class LogSettings(Settings):
    """Sentences or JSON events (:mod:`core.events`); `audit`: write the audit trail (auto: if clients are remote)."""

    format: Literal["text", "json"] = "text"
    audit: Literal["auto"] | bool = "auto"


class ServeSettings(Settings):
    """Whether and where the server's process serves the live page and ``/metrics``."""

    page: bool = False
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(0, ge=0, le=65535)


class SnapshotSettings(Settings):
    """Rounds whose uploads and global model are stored for the analyses."""

    rounds: tuple[Annotated[int, Field(ge=1)], ...] = ()


class Attack(Settings):
    """Attack of `clients` malicious clients, the same in all rounds, for experiments (:mod:`client.attack`).

    `factor` is in multiples of the honest update; null is the attack's default.
    """

    name: Literal["none", "sign_flip", "scaling", "stealth", "noise", "not_finite"] = "none"
    clients: int = Field(1, ge=1)
    factor: float | None = None


class Privacy(Settings):
    """Differential privacy of uploads, on the client (:mod:`client.privacy`).

    `clip` is the largest L2 norm of an update, `noise` the standard deviation of each entry's noise in units of `clip`,
    `delta` the probability that epsilon does not hold. ``randomness=seed`` is for experiments that must be repeatable.
    """

    enabled: bool = False
    clip: float = Field(1.0, gt=0)
    noise: float = Field(1.0, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    randomness: Literal["system", "seed"] = "system"


class Logger(Settings):
    """Logger that gets the numbers of every round, beside ``metrics.jsonl``."""

    model_config = ConfigDict(extra="allow")
    name: str


class RunConfig(AverageSettings):
    """The whole configuration of a run."""

    seed: int = Field(ge=0)
    rounds: int = Field(ge=1)
    stop_at: int | None = Field(None, ge=1)
    stop: StopSettings = StopSettings()
    clients_per_round: int = Field(ge=1)
    evaluate_every: int = Field(ge=1)
    evaluate_local: bool = False
    evaluate_clients: bool = False
    device: str = Field(pattern=DEVICE_NAMES, examples=["auto", "cpu", "cuda", "cuda:0", "mps"])
    data_root: str
    output: str | None
    resume: str | None
    train: Train
    federation: FederationSettings
    checkpoint: CheckpointSettings
    snapshots: SnapshotSettings = SnapshotSettings()
    log: LogSettings = LogSettings()
    serve: ServeSettings = ServeSettings()
    defence: Defence = Defence()
    compression: Compression = Compression()
    privacy: Privacy = Privacy()
    attack: Attack = Attack()
    clock: ClockSettings = ClockSettings()
    devices: Devices = Devices()
    logger: Logger
    task: SerializeAsAny[Settings]
    model: SerializeAsAny[Settings]
    partition: SerializeAsAny[Settings]
    method: SerializeAsAny[Settings]
    objective: SerializeAsAny[Settings] = Settings()
    engine: SerializeAsAny[Settings]
    names: dict[str, str]
    modules: dict[str, str]

    def module(self, group: str) -> ModuleType:
        """Return the module that implements `group` (``task``, ``model``, ...)."""
        return find(PACKAGES[group], self.modules[group], group)

    def load_data(self) -> FederatedData:
        """Return the task's data and its partition over clients; loaded once per process."""
        from fedcross.tasks.data import load as load_parts

        return load_parts(self.module("task"), self.task, self.module("partition"), self.partition, self.seed)

    def network(self, task: Task, seed: int | None = None, width: Width | None = None) -> tuple[nn.Module, str]:
        """Return the network that clients train, on the CPU, and the digest of its base; "" if all of it is trained.

        `seed` is for other initial weights than those of the run; `width` is the full one by default. A ConfigError
        says that the model does not fit the task, the method, ``train.only`` or ``privacy.enabled``, a DataError that
        the file of the base is not the one that ``train.base_sha256`` names.
        """
        from fedcross.strategies.registry import build_network
        from fedcross.tasks.models import create
        from fedcross.tasks.models.part import check_file, narrow
        from fedcross.tasks.models.weights import has_statistics

        chosen = self.seed if seed is None else seed
        model: nn.Module = create(self.modules["model"], self.model, task, chosen, width)
        base = ""
        if self.train.only:
            file = None if self.train.base is None else Path(self.data_root) / self.train.base
            if file is not None:
                check_file(file, self.train.base_sha256)
            base = narrow(model, self.train.only, file)
        network = build_network(self.new_method(), model, chosen)
        if self.privacy.enabled and has_statistics(network):
            sends = f"model={self.names['model']} would send statistics of its data (batch norm)"
            raise ConfigError(f"privacy.enabled=true: {sends}. Choose a model without batch norm.")
        return network, base

    def new_method(self) -> Method:
        """Return the run's method."""
        from fedcross.strategies.registry import method_class

        return method_class(self.modules["method"])(self.method)

    def new_objective(self) -> Objective:
        """Return what clients minimise; a ConfigError if the method's server cannot serve it."""
        from fedcross.strategies.registry import objective_of

        method = self.new_method()
        found = objective_of(method, self.modules["objective"], self.objective)
        if self.train.optimizer != "sgd" and (found.assumes_sgd or method.objective().assumes_sgd):
            why = f"the formulas of method={self.names['method']} assume SGD"
            raise ConfigError(f"train.optimizer={self.train.optimizer}: {why}. Set train.optimizer=sgd.")
        return found

    def corners(self, task: Task) -> Corners:
        """Return the shapes of the run's models at every width; a ConfigError as of :meth:`network`."""
        from fedcross.tasks.models import corners

        return corners(self.modules["model"], self.model, task)


def load(overrides: Sequence[str]) -> RunConfig:
    """Return the checked configuration for `overrides`; a ConfigError has every fault at once."""
    return _load(tuple(overrides), environment())


@functools.lru_cache(maxsize=64)
def _load(overrides: tuple[str, ...], variables: tuple[str, str]) -> RunConfig:
    config = check(compose(overrides))
    _checked.add((overrides, variables))
    return config


#: Configurations that this process has composed and checked.
_checked: set[tuple[tuple[str, ...], tuple[str, str]]] = set()


def load_text(text: str) -> RunConfig:
    """Return the checked configuration for the overrides in `text`, as Flower's run config carries them.

    In the process that started the run nothing is composed again.
    """
    return load(split(text))


def load_for_client(text: str) -> RunConfig:
    """Return the configuration of the run in `text` as a client of it needs it: without :data:`SERVER_ONLY`.

    Flower gives the same text to ServerApp and ClientApp. The server's folders do not exist on a device, and its logger
    may not be installed there. In the process that started the run nothing is composed again.
    """
    given = tuple(split(text))
    if (given, environment()) in _checked:
        return load(given)
    return load([o for o in given if o.lstrip("+~").split("=")[0].split(".")[0].split("/")[0] not in SERVER_ONLY])


def check(raw: dict[str, Any]) -> RunConfig:
    """Return `raw` as a :class:`RunConfig`, or raise a ConfigError with every fault found."""
    config, faults = parsed(raw)
    if config is not None:
        faults += cross_faults(config)
    if faults or config is None:
        raise ConfigError(faults)
    return config


def parsed(raw: dict[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """Return `raw` as a :class:`RunConfig`, and the faults of single settings; None if there are any."""
    faults: list[str] = []
    values = dict(raw)
    names: dict[str, str] = {}
    modules: dict[str, str] = {}
    for group in PACKAGES:
        part = dict(values.get(group) or {})
        names[group] = str(part.get("name", ""))
        modules[group] = str(part.pop("module", names[group]))
        try:
            kind = settings_class(group, modules[group])
            if "name" not in kind.model_fields:
                part.pop("name", None)
            values[group] = parse(kind, part, group, faults)
        except ConfigError as error:
            faults += error.faults
    values.pop("experiment", None)
    with_parts = {**values, "names": names, "modules": modules}
    rest = {name: value for name, value in with_parts.items() if name not in PACKAGES}
    slots = {group: Settings() for group in PACKAGES}
    config = parse(RunConfig, {**rest, **slots}, "", faults)
    if config is None or faults:
        return None, faults
    return config.model_copy(update={group: values[group] for group in PACKAGES}), []


def settings_class(group: str, name: str) -> type[Settings]:
    """Return the ``Params`` of the module that implements `name` of `group`."""
    if group == "objective" and name == "own":
        return Settings
    if group in ("method", "objective"):
        from fedcross.strategies.registry import method_class

        return method_class(name).Params
    kind = getattr(find(PACKAGES[group], name, group), "Params", None)
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        raise ConfigError(f"{group}.name={name!r}: this module is not a {group}. Choose a file of conf/{group}.")
    return kind
