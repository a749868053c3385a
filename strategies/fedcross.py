"""FedCross: each round K clients train K middleware models, one each; the server then cross-aggregates the models."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Round, Start, Task
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.schedule import Schedule, checked, values_of, within
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import mixing as mixings
from fedcross.strategies.pool.mixing import BY_SIMILARITY, Matrix, Part
from fedcross.strategies.pool.pool import Arrays, Pool

Alpha: TypeAlias = Annotated[Schedule, within(0.5, 1.0)]
Mode: TypeAlias = Annotated[Schedule, checked(lambda value: value in ("cross", "propellers"), "cross or propellers")]
Count: TypeAlias = Annotated[
    Schedule,
    checked(lambda value: isinstance(value, float) and value >= 1 and value == int(value), "whole numbers, 1 or more"),
]
Selection: TypeAlias = Literal[
    "in_order", "highest_similarity", "lowest_similarity", "random", "least_similar_derangement"
]
Similarity: TypeAlias = Literal["cosine", "paper", "chunked", "euclidean", "manhattan"]


class FedCrossParams(PooledParams, Widths):
    alpha: Alpha = 0.99
    selection: Selection = "lowest_similarity"
    similarity: Similarity = "cosine"
    part: Part = "parameters"
    mode: Mode = Field("cross", examples=["cross", "propellers"])
    propellers: int = Field(2, ge=1)
    propeller_weighting: Literal["alpha", "equal", "each"] = "equal"
    first_stage: int = Field(0, ge=0)
    global_model: Literal["mixed", "uploads"] = "mixed"
    k: Count | None = None
    independent_start: bool = False

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for number in range(1, 10_000) if self.propeller_weighting == "each" else ():
            own = 1 - self.propellers * (1 - self.at("alpha", number))
            if self.at("mode", number) == "propellers" and own <= 0:
                said = f"leaves the own model 1 - {self.propellers} (1 - alpha) = {own:g} in round {number}"
                raise ValueError(f"propeller_weighting=each {said}. Raise alpha or take fewer propellers")
        compared = self.similarity in ("cosine", "paper", "euclidean") and self.part == "parameters"
        constant = self.global_model == "mixed" and (self.k is None or len(set(values_of(self.k))) == 1)
        if self.widths and not (compared and constant):
            raise ValueError(
                "widths need similarity cosine, paper or euclidean, part parameters, global_model mixed, a constant k"
            )
        return self

    def remarks(self) -> list[str]:
        found = super().remarks()
        if set(values_of(self.alpha)) == {1.0}:
            found.append("method.alpha=1: no model takes anything from another, this is independent training.")
        if self.similarity == "chunked" and self.part != "state":
            found.append("method.similarity=chunked is the public code's measure with method.part=state only.")
        return found

    def faults(self, clients_per_round: int) -> list[str]:
        """Return errors where the settings do not fit the number of clients drawn each round."""
        if self.k is None:
            return super().faults(clients_per_round)
        fewest, wanted = min(values_of(self.k)), max(clients_per_round, len(self.widths))
        return [f"method.k={fewest:g}: clients or widths need {wanted} models. Raise it."] if fewest < wanted else []

    def models(self, clients_per_round: int, number: int) -> int:
        """Return the number of models in round `number`."""
        return clients_per_round if self.k is None else round(self.at("k", number))


@dataclass
class FedCrossState(PoolState):
    """The pool and its queue, and the mean of the last round's uploads for ``global_model=uploads``."""

    uploads_mean: Arrays | None = None


class FedCross(Pooled[FedCrossParams, FedCrossState]):
    """Hu et al., FedCross: Towards Accurate Federated Learning via Multi-Model Cross-Aggregation, ICDE 2024.

    The server sets ``w_i = alpha v_i + (1 - alpha) v_co(i)`` for all uploads v_i at once; the selection picks co(i).
    All K models start as copies of one random network. The global model is the uniform mean of the mixed pool; it is
    evaluated and deployed; only ``first_stage`` sends it.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Choices where the paper is silent:

    - In-order selection counts slots and rounds from 0 (the paper's 1-based Eq. 2 is off by one).
    - A slot without an upload keeps its model, does not mix in that round, and counts in the global mean.
    - With fewer clients than models the least recently trained ones go out and mix among themselves.
    - When K changes, the pool is resized and its mean stays the same (:meth:`strategies.pool.pool.Pool.resize`).
    - The number and weights of propellers, 2 and ``equal``, are this project's.
    - ``first_stage``, and one network for all models at the start, are the public code's.
    - Models of several widths are this project's (docs/widths.md).
    """

    may_change = Pooled.may_change | {"clients_per_round", "method.k"}

    def init(self, start: Start) -> FedCrossState:
        if faults := self.params.faults(start.clients_per_round):
            raise ConfigError(faults)
        pool = self.pool_of(start, self.params.models(start.clients_per_round, 1))
        for slot in range(len(pool)) if self.params.independent_start else ():
            if start.independent is None:
                raise ConfigError("method.independent_start=true needs the network; use the command fedcross.")
            pool.fill(start.independent(slot), [slot])
        return FedCrossState(pool, list(range(len(pool))))

    def dispatch(self, state: FedCrossState, round: Round) -> list[Task]:
        """Send row i of the pool to the i-th drawn client; the random order of the draw shuffles models and clients."""
        k, old = self.params.models(round.clients_per_round, round.number), len(state.queue)
        if k != old:
            state.pool.resize(k)
            state.queue = [*range(old, k), *(slot for slot in state.queue if slot < k)]
        return super().dispatch(state, round)

    def recombine(self, state: FedCrossState, round: Round, members: list[int]) -> dict[str, float]:
        pool = state.pool
        if self.params.global_model == "uploads":
            state.uploads_mean = pool.mean(members)
        mixing, gram = self._mixing(pool, round, members)
        if gram is None and self.params.due(round.number):
            gram = pool.gram(columns=pool.layout.columns(self.params.part))
        pool.mix(mixing)
        return mixings.chosen(mixing, members) | ({} if gram is None else mixings.diagnostics(gram, mixing))

    def _mixing(self, pool: Pool, round: Round, members: list[int]) -> tuple[Matrix, Matrix | None]:
        """Return this round's mixing matrix, and the Gram matrix of the whole pool if the selection computed it."""
        k, m, params, gram, measured = len(pool), len(members), self.params, None, None
        alpha = params.at("alpha", round.number)
        if round.number <= params.first_stage:
            return mixings.uniform(k, members), gram
        if params.at("mode", round.number) == "propellers":
            distances = mixings.offsets(m, params.propellers, round.number)
            own = {"equal": None, "alpha": alpha, "each": 1 - len(distances) * (1 - alpha)}[params.propeller_weighting]
            return mixings.propellers(k, members, distances, own), gram
        if m < 2 or alpha == 1:
            return np.eye(k), gram
        if params.selection in BY_SIMILARITY:
            measured, gram = mixings.similarity(params.similarity, pool, members, params.part)
        collaborators = mixings.select(params.selection, m, round.number, round.seed, measured)
        return mixings.cross(k, members, collaborators, alpha), gram

    def global_model(self, state: FedCrossState) -> Arrays:
        return state.pool.mean() if state.uploads_mean is None else state.uploads_mean
