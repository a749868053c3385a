"""Flower's own strategies as methods: they aggregate, everything else is done here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from pydantic import Field, model_validator
from torch import Tensor

from fedcross.core.errors import nearest
from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Objective, Prepared, Visit, flatten
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, encode

#: Arguments of Flower's strategies that say how clients are found and messages are read; that is done here.
OURS = {
    "fraction_train",
    "fraction_evaluate",
    "min_train_nodes",
    "min_evaluate_nodes",
    "min_available_nodes",
    "weighted_by_key",
    "arrayrecord_key",
    "configrecord_key",
    "train_metrics_aggr_fn",
    "evaluate_metrics_aggr_fn",
    "selection_rule",
}
#: Strategies with an optimiser on the server, and what they remember between rounds.
OPTIMISERS = (flower.FedAvgM, flower.FedAdam, flower.FedYogi, flower.FedAdagrad)
MOMENTS = ("m_t", "v_t")
VELOCITY = "momentum_vector"
MU = "proximal-mu"  # Flower's own name for it in the configuration that clients get
NODE = 1


class FlwrParams(Settings):
    """Which strategy, and its arguments."""

    name: Literal[
        "FedAvg", "FedProx", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedMedian", "FedTrimmedAvg", "Krum",
        "MultiKrum", "Bulyan",
    ]  # fmt: skip
    options: dict[str, int | float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _flower_takes_them(self) -> FlwrParams:
        kind = getattr(flower, self.name)
        known = [name for name in inspect.signature(kind).parameters if name not in OURS]
        for option in self.options:
            if option not in known:
                raise ValueError(f"{self.name} has no option {option!r}. {nearest(option, known)}")
        try:
            build(self)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Flower's {self.name} refuses these options: {error}") from error
        return self


class Proximal(Objective[FlwrParams]):
    """Cross-entropy, and ``mu/2 |w - G|^2`` over the parameters if the server says so."""

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


class Flwr(SingleModel[FlwrParams]):
    """A strategy of Flower 1.41, chosen by ``method.name``, with its own arguments in ``method.options``.

    ``FedAvg``, ``FedProx`` (Li et al. 2020; ``proximal_mu``), ``FedAvgM`` (Hsu et al. 2019; ``server_learning_rate``,
    ``server_momentum``), ``FedAdam``, ``FedYogi``, ``FedAdagrad`` (Reddi et al. 2021; ``eta``, ``tau``, and for the
    first two ``beta_1``, ``beta_2``; ``eta_l`` is ignored by Flower), ``FedMedian``, ``FedTrimmedAvg`` (Yin et al.
    2018; ``beta``), ``Krum``, ``MultiKrum`` (Blanchard et al. 2017; ``num_malicious_nodes``, and the second
    ``num_nodes_to_select``), ``Bulyan`` (El Mhamdi et al. 2018; ``num_malicious_nodes``). Equations and defaults are
    Flower's.

    Clients are sampled, uploads guarded and bytes counted as for every other method; the accepted uploads are handed to
    Flower's ``aggregate_train`` as messages with number of examples and model, and what it returns is the new global
    model. ``proximal_mu`` travels in the message as Flower sends it and adds ``mu (w - G)`` to the client's gradient.

    State: the global model, and momenta (``m_t``, ``v_t``, ``momentum_vector``) where the strategy has some; clients
    keep none. Wire: one model down, one up.

    Deviations from Flower: integer entries (batch counters) never reach the strategy. Flower would make them float64,
    and in Krum's distances a counter outweighs all weights; they are averaged by examples and stay integers. Strategies
    with an optimiser get parameters only, and batch-normalisation statistics are averaged by examples: a step of Adam
    can make a running variance negative. Dtypes stay those of the model. If Flower declines to aggregate (Bulyan with
    fewer than 4 f + 3 uploads), the model stays and ``flower_skipped`` is 1 in the metrics.
    """

    Objective = Proximal

    def setup(self, arrays: Arrays) -> None:
        """Keep the model and create Flower's strategy."""
        super().setup(arrays)
        self.strategy: Any = build(self.params)
        optimiser = isinstance(self.strategy, OPTIMISERS)
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        self.handed = [name for name in floats if not optimiser or name in self.parameter_names]

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model, and the proximal weight where there is one."""
        payloads = super().dispatch(current)
        if mu := float(getattr(self.strategy, "proximal_mu", 0.0)):
            for payload in payloads:
                payload.config = {MU: mu}
        return payloads

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Let Flower's strategy make the new global model."""
        if not uploads:
            return {}
        self._set_current()
        with quiet():
            arrays, _ = self.strategy.aggregate_train(current.number, [self._message(u) for u in uploads])
        if arrays is None:
            return {"flower_skipped": 1.0}
        rest = [n for n in self.model if n not in self.handed]
        kept = weighted_mean(
            [{n: u.arrays[n] for n in rest} for u in uploads], [float(u.num_examples) for u in uploads]
        )
        made = {n: np.asarray(arrays[n].numpy()).astype(self.model[n].dtype) for n in self.handed}
        self.model = {name: made[name] if name in made else kept[name] for name in self.model}
        return {}

    def _set_current(self) -> None:
        """Tell strategies that step from the model sent which one that was; Flower does it in ``configure_train``."""
        sent = {name: self.model[name] for name in self.handed}
        if isinstance(self.strategy, flower.FedAvgM):
            self.strategy.current_arrays = encode(sent)
        elif isinstance(self.strategy, OPTIMISERS):
            self.strategy.current_arrays = sent

    def _message(self, upload: Upload) -> Message:
        """Return `upload` as the reply that Flower's strategies read."""
        content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
            "arrays": encode({name: upload.arrays[name] for name in self.handed}),
            "metrics": MetricRecord({"num-examples": upload.num_examples}),
        }
        return Message(RecordDict(content), dst_node_id=NODE, message_type=MessageType.TRAIN)

    def state(self) -> State:
        """Return the model and the strategy's momenta."""
        state = super().state()
        for moment in MOMENTS:
            for name, array in (getattr(self.strategy, moment, None) or {}).items():
                state.arrays[f"{moment}.{name}"] = np.asarray(array)
        for name, array in zip(self.handed, getattr(self.strategy, VELOCITY, None) or ()):
            state.arrays[f"{VELOCITY}.{name}"] = np.asarray(array)
        return state

    def restore(self, state: State) -> None:
        """Take over model and momenta."""
        super().restore(state)
        self.strategy = build(self.params)
        for moment in (*MOMENTS, VELOCITY):
            found = {n: a for n in self.handed if (a := state.arrays.get(f"{moment}.{n}")) is not None}
            if found:
                setattr(self.strategy, moment, list(found.values()) if moment == VELOCITY else found)


def build(params: FlwrParams) -> flower.FedAvg:
    """Return Flower's strategy for `params`."""
    with quiet():
        strategy: flower.FedAvg = getattr(flower, params.name)(**params.options)
    return strategy


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Flower from logging every aggregation; its warnings stay."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
