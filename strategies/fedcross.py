"""FedCross: each round K clients train K middleware models, one each; the server then cross-aggregates the models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.parts.corners import WidthPool
from fedcross.strategies.parts.pooled import PooledParams, PoolState, Slots, write
from fedcross.strategies.parts.schedule import Choice, Constant, Schedule, whole_numbers, within
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import mixing as mixings
from fedcross.strategies.pool.mixing import FROM_GRAM, SELECTIONS, Matrix, Mixing, Part, Question, chosen, similarity
from fedcross.strategies.pool.pool import Arrays, Pool

Alpha: TypeAlias = Annotated[Schedule, AfterValidator(within(0.5, 1.0))]
Count: TypeAlias = Annotated[Schedule, AfterValidator(whole_numbers)]
Selection: TypeAlias = Literal[
    "in_order", "highest_similarity", "lowest_similarity", "random", "least_similar_derangement"
]
Similarity: TypeAlias = Literal["cosine", "paper", "chunked", "euclidean", "manhattan"]


class FedCrossParams(PooledParams, Widths):
    """Settings, explained in ``conf/method/fedcross.yaml``; ``alpha``, ``mode`` and ``k`` are schedules."""

    alpha: Alpha = Constant(value=0.99)
    selection: Selection = "lowest_similarity"
    similarity: Similarity = "cosine"
    part: Part = "parameters"
    mode: Choice[Literal["cross", "propellers"]] = Choice.always("cross")
    propellers: int = Field(2, ge=1)
    propeller_weighting: Literal["alpha", "equal", "each"] = "equal"
    first_stage: int = Field(0, ge=0)
    global_model: Literal["mixed", "uploads"] = "mixed"
    k: Count | None = None
    independent_start: bool = False

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for number in range(1, max(self.mode.settled(), self.alpha.settled()) + 1):
            own = 1 - self.propellers * (1 - self.alpha.at(number))
            if self.propeller_weighting == "each" and self.mode.at(number) == "propellers" and own <= 0:
                raise ValueError(
                    f"propeller_weighting=each leaves the own model 1 - {self.propellers} (1 - alpha) = {own:g} in "
                    f"round {number}, it must be above 0. Raise alpha or take fewer propellers"
                )
        wrong = {
            "similarity": self.similarity in ("chunked", "manhattan"),
            "part": self.part != "parameters",
            "global_model": self.global_model != "mixed",
            "k": self.k is not None and len(set(self.k.values())) > 1,
        }
        if self.widths and (found := [name for name, bad in wrong.items() if bad]):
            raise ValueError(
                "widths need similarity cosine, paper or euclidean, part parameters, global_model mixed and a constant "
                f"k; wrong: {', '.join(found)}"
            )
        return self

    def remarks(self) -> list[str]:
        """Return warnings about settings that are allowed but unusual."""
        found = super().remarks()
        if set(self.alpha.values()) == {1.0}:
            found.append("method.alpha=1: no model takes anything from another, this is independent training.")
        if self.similarity == "chunked" and self.part != "state":
            found.append("method.similarity=chunked is the public code's measure with method.part=state only.")
        return found

    def faults(self, clients_per_round: int) -> list[str]:
        """Return errors where the settings do not fit the number of clients drawn each round."""
        fewest = clients_per_round if self.k is None else min(self.k.values())
        name = "clients_per_round" if self.k is None else "method.k"
        if fewest < len(self.widths):
            return [f"method.widths={list(self.widths)}: {fewest:g} models; each width needs one. Raise {name}."]
        if fewest < clients_per_round:
            return [f"method.k={fewest:g}: fewer models than clients_per_round={clients_per_round}. Raise method.k."]
        return []

    def models(self, clients_per_round: int, number: int) -> int:
        """Return the number of models in round `number`."""
        return clients_per_round if self.k is None else round(self.k.at(number))


@dataclass
class FedCrossState(PoolState):
    """The pool and its queue, and the mean of the last round's uploads for ``global_model=uploads``."""

    uploads_mean: Arrays | None = None


class FedCross(Slots[FedCrossParams, FedCrossState]):
    """Hu et al., FedCross: Towards Accurate Federated Learning via Multi-Model Cross-Aggregation, ICDE 2024.

    The server sets ``w_i = alpha v_i + (1 - alpha) v_co(i)`` for all uploads v_i at once; the selection picks co(i).
    All K models start as copies of one random network. The global model is the uniform mean of the mixed pool; it is
    evaluated and deployed, and never sent to a client.

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

    may_change = Slots.may_change | {"clients_per_round", "method.k"}

    def init(self, start: Start) -> FedCrossState:
        """Fill the pool with copies of the initial model, or with independent ones."""
        if faults := self.params.faults(start.clients_per_round):
            raise ConfigError(faults)
        pool = self.pool_of(start, self.params.models(start.clients_per_round, 1))
        for slot in range(len(pool)) if self.params.independent_start else ():
            if start.independent is None:
                raise ConfigError("method.independent_start=true needs the network; use the command fedcross.")
            arrays = start.independent(slot)
            pool.write(slot, pool.corners.corner(arrays, pool.widths[slot]) if isinstance(pool, WidthPool) else arrays)
        return FedCrossState(pool, list(range(len(pool))))

    def dispatch(self, state: FedCrossState, round: Round) -> list[Task]:
        """Send row i of the pool to the i-th drawn client; the random order of the draw shuffles models and clients."""
        k, old = self.params.models(round.clients_per_round, round.number), len(state.pool)
        if k != old:
            state.pool.resize(k)
            state.queue = [*range(old, k), *(slot for slot in state.queue if slot < k)]
        return super().dispatch(state, round)

    def aggregate(self, state: FedCrossState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write the uploads into their rows, choose the collaborators, and mix the rows in place."""
        pool, members = state.pool, write(state, uploads)
        if members and self.params.global_model == "uploads":
            state.uploads_mean = pool.mean(members=members)
        mixing, gram = self._mixing(pool, round, members)
        every = self.params.diagnostics_every
        if gram is None and every and round.number % every == 0:
            gram = pool.gram(columns=pool.layout.columns(self.params.part))
        pool.mix(mixing)
        waiting = {"waiting_slots": float(state.waiting)} if state.waiting else {}
        return waiting | chosen(mixing, members) | ({} if gram is None else mixings.diagnostics(gram, mixing))

    def _mixing(self, pool: Pool, round: Round, members: list[int]) -> tuple[Mixing, Matrix | None]:
        """Return this round's mixing matrix, and the Gram matrix of the whole pool if the selection computed it."""
        k, m, params = len(pool), len(members), self.params
        if round.number <= params.first_stage:
            return mixings.uniform(k, members), None
        alpha = params.alpha.at(round.number)
        if params.mode.at(round.number) == "propellers":
            distances = mixings.offsets(m, params.propellers, round.number)
            own = mixings.propeller_share(params.propeller_weighting, alpha, len(distances))
            return mixings.propellers(k, members, distances, own), None
        if m < 2 or alpha == 1.0:
            return mixings.identity(k), None
        selection = SELECTIONS[params.selection]
        measured, gram = (
            similarities(params.similarity, params.part, pool, members) if selection.needs_similarity else (None, None)
        )
        return mixings.cross(k, members, selection(Question(m, round.number, round.seed, measured)), alpha), gram

    def global_model(self, state: FedCrossState) -> Arrays:
        """Return the uniform mean of the pool or, if so configured, of the last round's uploads."""
        return state.pool.mean() if state.uploads_mean is None else state.uploads_mean


def similarities(name: str, part: Part, pool: Pool, members: Sequence[int]) -> tuple[Matrix, Matrix | None]:
    """Return the members' similarities (m, m), and the Gram matrix of the whole pool if they came from it."""
    if (measure := FROM_GRAM.get(name)) is None:
        return similarity(name, pool, members, part), None
    own = np.ix_(members, members)
    if isinstance(pool, WidthPool):
        return pool.similarity(measure)[own], pool.gram()
    gram = pool.gram(columns=pool.layout.columns(part))
    return measure(gram[own]), gram
