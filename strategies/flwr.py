"""Flower strategies as methods: the strategy configures and aggregates, fedcross does everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import strategy as flower
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, KEY_NORM_BIT
from pydantic import Field
from torch import Tensor

from fedcross.core.errors import ConfigError, FedcrossError, FederationError
from fedcross.core.settings import Settings
from fedcross.strategies.defence.rules import Judgement, lower_median
from fedcross.strategies.flower.foreign import (
    OPTIMISERS,
    Drawn,
    build,
    by_node,
    chain,
    is_private,
    shortfalls,
    surroundings,
    thin,
)
from fedcross.strategies.flower.memory import recall, remember, snapshot
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Objective, Outcome, Prepared, Trained, Visit, flatten
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import GLOBAL, Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, encode

MU = "proximal-mu"  # Flower's own name for it in the configuration that clients get
LOSS = "train-loss"
#: What strategies end with an error without.
NEEDS = {
    flower.QFedAvg: "the training loss",
    flower.DifferentialPrivacyClientSideAdaptiveClipping: "whether it clipped its update",
}


class FlwrParams(Settings):
    """The strategy and its arguments.

    Parameters
    ----------
    name : str
        Short name of a strategy of ``flwr.serverapp.strategy``. If `strategy` is given, only a label for the results.
    strategy : str or None
        Any subclass of ``flwr.serverapp.strategy.Strategy``: ``package.module.Class`` or ``package.module:Class``.
    arguments : dict
        Arguments of its constructor. An argument that is itself a strategy is given as a name or path, or as
        ``{strategy: PATH, arguments: {...}}``.
    options : dict
        Older name of `arguments`.
    """

    name: str = "FedAdam"
    strategy: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def path(self) -> str:
        """Import path or short name of the strategy."""
        return self.strategy or self.name

    def build(self, clients: int) -> Any:
        """Return a new strategy for rounds of `clients` clients; ValueError if the settings do not fit it."""
        return build(self.path, {**self.options, **self.arguments}, clients)

    def faults(self, clients_per_round: int) -> list[str]:
        """Return why the strategy cannot be built for rounds of so many clients, or makes nothing of their replies."""
        try:
            built = self.build(clients_per_round)
        except ValueError as error:
            return [f"method: {error}"]
        return [f"method: {fault}" for fault in shortfalls(built, clients_per_round)]

    def round_remarks(self, clients_per_round: int) -> list[str]:
        """Return warnings about a strategy that gets fewer replies than its paper asks for."""
        return [f"method: {remark}" for remark in thin(self.build(clients_per_round), clients_per_round)]

    def privacy_faults(self, clients_per_round: int) -> list[str]:
        """Return why the strategy cannot work with ``privacy.enabled``: clients then send nothing but their model."""
        if self.faults(clients_per_round):
            return []
        inside = chain(self.build(clients_per_round))
        return [
            f"privacy.enabled=true: Flower's {kind.__name__} needs {what} of each client, which nothing protects, so "
            "no client sends it. Choose another strategy, or turn privacy.enabled off."
            for kind, what in NEEDS.items()
            if any(isinstance(one, kind) for one in inside)
        ]


class FlowerClient(Objective[FlwrParams]):
    """Cross-entropy, with the options that Flower's strategies send to a client in its configuration.

    ``proximal-mu`` adds ``mu/2 |w - G|^2`` over the parameters. ``clipping_norm`` shortens the update of the parameters
    to that length and reports whether it was longer, as Flower's ``fixedclipping_mod`` and ``adaptiveclipping_mod``.
    """

    def prepare(self, visit: Visit) -> Prepared:
        """Return mu and the received parameters."""
        mu = float(visit.config.get(MU, 0.0))
        if not mu:
            return {}
        start = flatten(visit.params)
        return {"mu": torch.tensor(mu, dtype=start.dtype, device=start.device), "start": start}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``mu (w - G)``."""
        return prepared["mu"] * (flat - prepared["start"]) if prepared else None

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Clip the update in place, if the server says so."""
        if (limit := visit.config.get(KEY_CLIPPING_NORM)) is None:
            return Outcome()
        with torch.no_grad():
            start = flatten(visit.params)
            update = trained.flat - start
            length = float(update.double().norm())
            if length > float(limit):
                trained.flat.copy_(start + update * (float(limit) / length))
        return Outcome(metrics={KEY_NORM_BIT: float(length > float(limit))})


class Flwr(SingleModel[FlwrParams]):
    """Any strategy of Flower's Message API: a short name in ``method.name``, or an import path in ``method.strategy``.

    Short names are those of ``flwr.serverapp.strategy`` 1.41: ``FedAvg``, ``FedProx`` (Li et al. 2020;
    ``proximal_mu``), ``FedAvgM`` (Hsu et al. 2019; ``server_learning_rate``, ``server_momentum``), ``FedAdam``,
    ``FedYogi``, ``FedAdagrad`` (Reddi et al. 2021; ``eta``, ``tau``, and for the first two ``beta_1``, ``beta_2``;
    ``eta_l`` is ignored by Flower), ``QFedAvg`` (Li et al. 2020; ``q``, ``client_learning_rate``), ``FedMedian``,
    ``FedTrimmedAvg`` (Yin et al. 2018; ``beta``), ``Krum``, ``MultiKrum`` (Blanchard et al. 2017;
    ``num_malicious_nodes``, and the second ``num_nodes_to_select``), ``Bulyan`` (El Mhamdi et al. 2018;
    ``num_malicious_nodes``), and the four wrappers for central differential privacy,
    ``DifferentialPrivacyServerSideFixedClipping`` and so on, around another ``strategy``. Equations and defaults are
    theirs; arguments are given in ``method.arguments``.

    fedcross samples clients, checks uploads and counts bytes as for every other method. A round calls the strategy's
    ``configure_train``, which sees only the drawn clients (node id: partition id + 1), and its ``aggregate_train`` with
    the accepted uploads as replies. The client gets the arrays and the configuration that the strategy puts into its
    message; a client without a message does not train. Clients apply ``proximal-mu`` and ``clipping_norm`` in the
    configuration. Replies hold the records ``arrays`` and ``metrics`` (``num-examples``, ``train-loss``, also as
    ``train_loss``, the mean over the visit). ``configure_evaluate`` and ``start`` are not called.

    State: the global model, and the attributes of the strategy (and of strategies inside it, if its constructor builds
    them) that are numbers, strings or arrays, Python's or numpy's, records of arrays, or lists, tuples, sets and dicts
    of these. Other attributes start anew when a run is resumed; a warning names one that has changed, or may have.
    Clients keep none. Wire: one model down, one up.

    Deviations from Flower: integer entries (batch counters) never reach the strategy. Flower would make them float64,
    and in Krum's distances a counter outweighs all weights; they are averaged by examples and stay integers. Strategies
    with an optimiser get parameters only, and batch-normalisation statistics are averaged by examples: a step of Adam
    can make a running variance negative. For the same reason differential privacy is refused with such statistics.
    Dtypes stay those of the model. Random numbers that a strategy draws from the global generators (noise, say) are
    keyed by the run's seed and the round: a run can be repeated, but the noise protects nothing from those who know the
    seed. If a strategy declines to aggregate (Bulyan in a round with fewer than 4 f + 3 uploads), the model stays and
    ``flower_skipped`` is 1 in the metrics. A metric that more than half of the clients report is the median of theirs
    for the others, since strategies want the same ones of everyone. With the defence on, a loss counts as
    ``defence.weight`` times the median at most, and as the median divided by that at least (QFedAvg weighs by it, and
    with q below 1 a loss of 0 stops its steps); a reported clipping counts as 0 to 1.
    """

    Objective = FlowerClient

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        if faults := self.params.faults(self.federation.clients_per_round):
            raise ConfigError(faults)
        self._lost: set[str] = set()  # attributes that no checkpoint holds, as far as that has been said

    def setup(self, arrays: Arrays) -> None:
        """Keep the model and create the strategy."""
        super().setup(arrays)
        self._create()
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        private = is_private(self.strategy)
        if private and (others := [name for name in floats if name not in self.parameter_names]):
            raise ConfigError(
                f"method.strategy={self.params.path}: {others[0]} is no trained parameter (batch norm, or frozen), and "
                "noise could make it useless. Choose a model that has only trained ones."
            )
        only_parameters = private or any(isinstance(one, OPTIMISERS) for one in chain(self.strategy))
        self.handed = [name for name in floats if not only_parameters or name in self.parameter_names]

    def _create(self) -> None:
        self.strategy: Any = self.params.build(self.federation.clients_per_round)
        self._fresh = snapshot(self.strategy)
        self._configured: Round | None = None

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the arrays and configuration of the strategy's messages to the drawn clients."""
        messages = self._configure(current)
        models: dict[int, Arrays] = {}  # one for each record, so that clients that get the same share it
        payloads = [
            Payload(client, slot, self._given(messages[client + 1], models), config=_config(messages[client + 1]))
            for slot, client in enumerate(current.clients)
            if client + 1 in messages
        ]
        for payload in payloads if len(models) == 1 else ():
            payload.stream = GLOBAL
        return payloads

    def _configure(self, current: Round) -> dict[int, Message]:
        """Let the strategy configure the round; return its messages by node."""
        nodes = [client + 1 for client in current.clients]
        sent = encode({name: self.model[name] for name in self.handed})
        with self._told(), surroundings(current.seed, current.number, "flower configure"):
            made = self.strategy.configure_train(current.number, sent, ConfigRecord(), Drawn(nodes))
            messages = by_node(made, nodes)
        self._configured = current
        return messages

    def _given(self, message: Message, models: dict[int, Arrays]) -> Arrays:
        """Return the model in `message`; `models` holds those of the round so far, by the id of their record."""
        record = next(iter(message.content.array_records.values()), None)
        if id(record) not in models:
            models[id(record)] = self.model if record is None else {**self.model, **self._decoded(record)}
        return models[id(record)]

    def _decoded(self, record: ArrayRecord) -> Arrays:
        """Return the strategy's arrays in the dtypes of the model, if they are those that it was handed."""
        arrays = {str(name): np.asarray(array.numpy()) for name, array in record.items()}
        if {n: a.shape for n, a in arrays.items()} != {n: self.model[n].shape for n in self.handed}:
            raise FederationError(
                f"method.strategy={self.params.path}: it gives arrays of other names or shapes than it got."
            )
        return {name: arrays[name].astype(self.model[name].dtype) for name in self.handed}

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Let the strategy compute the new global model."""
        if not uploads:
            return {}
        if self._configured != current:
            self._configure(current)
        replies = self._replies(uploads)
        with self._told(), surroundings(current.seed, current.number, "flower aggregate"):
            arrays, metrics = self.strategy.aggregate_train(current.number, replies)
        if arrays is None:
            return {"flower_skipped": 1.0}
        rest = [n for n in self.model if n not in self.handed]
        kept = weighted_mean(
            [{n: u.arrays[n] for n in rest} for u in uploads], [float(u.num_examples) for u in uploads]
        )
        made = self._decoded(arrays)
        self.model = {name: made[name] if name in made else kept[name] for name in self.model}
        told = {name for reply in replies for name in reply.content.metric_records["metrics"]}
        own = {name: value for name, value in (metrics or {}).items() if name not in told}
        return {f"flower_{name}": float(value) for name, value in own.items() if isinstance(value, int | float)}

    def judge_extras(self, uploads: list[Upload]) -> Judgement:
        """Return the uploads with bounded metrics, as far as strategies compute with these, and how many were not."""
        losses = [upload.metrics[LOSS] for upload in uploads if LOSS in upload.metrics]
        ends = {KEY_NORM_BIT: (0.0, 1.0)}
        if losses and (middle := lower_median(losses)) >= 0:  # an app's own loss may be below zero, by its nature
            ends[LOSS] = (middle / self.federation.defence.weight, middle * self.federation.defence.weight)
        fair = [
            {name: min(max(u.metrics[name], least), most) for name, (least, most) in ends.items() if name in u.metrics}
            for u in uploads
        ]
        kept = [replace(u, metrics={**u.metrics, **told}) for u, told in zip(uploads, fair, strict=True)]
        return Judgement(kept, [], sum(u.metrics != new.metrics for u, new in zip(uploads, kept, strict=True)))

    def _replies(self, uploads: list[Upload]) -> list[Message]:
        """Return `uploads` as the replies that Flower's strategies read; they want the same metrics from everyone."""
        told: dict[str, list[float]] = {}
        for upload in uploads:
            for name, value in upload.metrics.items():
                told.setdefault(name, []).append(value)
        common = {name: lower_median(values) for name, values in told.items() if 2 * len(values) > len(uploads)}
        replies = []
        for upload in uploads:
            metrics: dict[str, Any] = {name: upload.metrics.get(name, middle) for name, middle in common.items()}
            if LOSS in metrics:
                metrics["train_loss"] = metrics[LOSS]
            content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
                "arrays": encode({name: upload.arrays[name] for name in self.handed}),
                "metrics": MetricRecord({**metrics, "num-examples": upload.num_examples}),
            }
            asked = Message(RecordDict(), dst_node_id=upload.client + 1, message_type=MessageType.TRAIN)
            replies.append(Message(RecordDict(content), reply_to=asked))
        return replies

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn an exception raised by the strategy into an error that names the strategy."""
        try:
            yield
        except FedcrossError:
            raise
        except Exception as error:
            raise FederationError(
                f"method.strategy={self.params.path}: {type(error).__name__} in it: {error}"
            ) from error

    def state(self) -> State:
        """Return the model and the strategy's own state."""
        state, sent = super().state(), {name: self.model[name] for name in self.handed}
        own, lost = remember(self.strategy, self._fresh, sent)
        for name in lost.keys() - self._lost:
            self._lost.add(name)
            log(
                WARNING,
                f"fedcross: method.strategy={self.params.path}: no checkpoint holds its attribute {name} (a "
                f"{lost[name]} is in it), so a resumed run starts with a new one. Keep numbers, texts and arrays, also "
                "in lists, tuples, sets and dicts, and strategies that its constructor builds.",
            )
        return State({**state.arrays, **own.arrays}, {**state.values, **own.values})

    def restore(self, state: State) -> None:
        """Load the model and the strategy's own state."""
        super().restore(state)
        self._create()
        recall(self.strategy, state, self.handed)


def _config(message: Message) -> dict[str, Any]:
    """Return the configuration in `message`."""
    return {name: value for record in message.content.config_records.values() for name, value in record.items()}
