"""FedCross: each round K clients train K middleware models, one each; the server then cross-aggregates the models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from fedcross.core.errors import ConfigError
from fedcross.strategies.parts.schedule import Choice, Constant, Schedule, within
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool.layout import Arrays, Layout
from fedcross.strategies.pool.mixing import Mixing, cross, identity, offsets, propeller_share, propellers, uniform
from fedcross.strategies.pool.pool import Storage, diagnostics
from fedcross.strategies.pool.selection import Question, find_selection
from fedcross.strategies.pool.similarity import FROM_GRAM, Part, find_similarity
from fedcross.strategies.pool.sliced import SlicedPool
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.sized_slots import SizedSlots
from fedcross.strategies.wire.protocol import Payload, Round, Upload


def _whole(schedule: Schedule) -> Schedule:
    """Check that a schedule has whole numbers, 1 or more, as its ends."""
    wrong = [value for value in schedule.values() if value < 1 or value != int(value)]
    if wrong:
        raise ValueError(f"must be a whole number of models, 1 or more, not {wrong[0]:g}")
    return schedule


Alpha: TypeAlias = Annotated[Schedule, AfterValidator(within(0.5, 1.0))]
Count: TypeAlias = Annotated[Schedule, AfterValidator(_whole)]
Gram: TypeAlias = NDArray[np.float64]

#: Up to this pool size the metrics have a count for each model (``chosen_0``, ``chosen_1``, ...).
COUNTED = 20


class FedCrossParams(Widths):
    """Settings of FedCross; those marked *schedule* may change from round to round (:mod:`strategies.parts.schedule`).

    Parameters
    ----------
    alpha : schedule
        Weight of a model's own upload in its new value, 0.5 to 1; with 1 the models train independently.
    selection : str
        Rule that picks each model's collaborator (:mod:`strategies.pool.selection`).
    similarity, part : str
        Similarity measure, for the selections that use one (:mod:`strategies.pool.similarity`), and the values that it
        compares: the trained ``parameters``, or the whole ``state``, which includes the buffers.
    mode : choice per round
        ``cross``: each model mixes with one collaborator, which `selection` picks. ``propellers``: each model mixes
        with several, always in order.
    propellers : int
        P, the number of propeller models, 1 or more. With m models in a round's mixing at most m - 1 are used.
    propeller_weighting : str
        ``equal``: every model weighs 1/(P + 1). ``each``: each propeller weighs 1 - alpha and the own model
        1 - P(1 - alpha), which must be above 0. ``alpha``: the own model weighs alpha, each propeller (1 - alpha)/P.
    first_stage : int
        B: in rounds 1 to B every model becomes the uniform mean of the round's uploads.
    global_model : str
        ``mixed``: mean of the pool (the paper). ``uploads``: mean of the round's uploads, unmixed (the public code).
    k : schedule, optional
        Number of models in the pool, at least ``clients_per_round``; unset, it is ``clients_per_round``. The values of
        a ramp are rounded to whole numbers.
    diagnostics_every : int
        Rounds between measurements of ``pool_similarity_mean`` and ``pool_spread``; 0 for never. In rounds where the
        selection computes the pool's Gram matrix anyway, both are always measured. With `widths` they are of the
        narrowest corner, which all models have, and say nothing of what only wider ones have.
    independent_start : bool
        Whether the K models start as K different random networks (seeded by run seed and slot) instead of K copies of
        one. The paper writes w_0^1 ... w_0^K and does not say which it means; the public code copies one.
    storage : Storage
        When the pool is kept in a memory-mapped file, and where that file lies.
    widths, shares : tuple of float
        Widths of the pool's models, and the share of the slots that each gets (docs/heterogeneous.md); without widths
        every model is the full one.
    """

    alpha: Alpha = Constant(value=0.99)
    selection: Literal["in_order", "highest_similarity", "lowest_similarity", "random", "least_similar_derangement"] = (
        "lowest_similarity"
    )
    similarity: Literal["cosine", "paper", "chunked", "euclidean", "manhattan"] = "cosine"
    part: Part = "parameters"
    mode: Choice[Literal["cross", "propellers"]] = Choice.always("cross")
    propellers: int = Field(2, ge=1)
    propeller_weighting: Literal["alpha", "equal", "each"] = "equal"
    first_stage: int = Field(0, ge=0)
    global_model: Literal["mixed", "uploads"] = "mixed"
    k: Count | None = None
    diagnostics_every: int = Field(1, ge=0)
    independent_start: bool = False
    storage: Storage = Storage()

    @model_validator(mode="after")
    def _own_share(self) -> Self:
        """Check that the own model's weight stays above 0 when each propeller weighs 1 - alpha."""
        if self.propeller_weighting != "each":
            return self
        for number in range(1, max(self.mode.settled(), self.alpha.settled()) + 1):
            own = 1 - self.propellers * (1 - self.alpha.at(number))
            if self.mode.at(number) == "propellers" and own <= 0:
                raise ValueError(
                    f"propeller_weighting=each leaves the own model 1 - {self.propellers} (1 - alpha) = {own:g} in "
                    f"round {number}, it must be above 0. Raise alpha or take fewer propellers"
                )
        return self

    @model_validator(mode="after")
    def _sliced(self) -> Self:
        """Check that the other settings can be kept in a pool of several widths."""
        if not self.widths:
            return self
        wrong = {
            "similarity": self.similarity in ("chunked", "manhattan"),
            "part": self.part != "parameters",
            "global_model": self.global_model != "mixed",
            "k": self.k is not None and len(set(self.k.values())) > 1,
        }
        if found := [name for name, bad in wrong.items() if bad]:
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
        fewest = min(self.k.values()) if self.k is not None else clients_per_round
        if fewest < len(self.widths):
            name = "clients_per_round" if self.k is None else "method.k"
            return [
                f"method.widths={list(self.widths)}: {fewest:g} models; each width needs one. Raise {name} or "
                "give fewer widths."
            ]
        if fewest >= clients_per_round:
            return []
        return [
            f"method.k={fewest:g}: fewer models than clients_per_round={clients_per_round}, some clients would get "
            "none. Raise k or lower clients_per_round."
        ]


class FedCross(SizedSlots[FedCrossParams]):
    """Hu et al., FedCross: Towards Accurate Federated Learning via Multi-Model Cross-Aggregation, ICDE 2024.

    The server sets ``w_i = alpha v_i + (1 - alpha) v_co(i)`` for all uploads v_i at once; the selection picks co(i).
    All K models start as copies of one random network (with ``independent_start`` as K different ones). The global
    model is the uniform mean of the mixed pool. It is for evaluation and deployment and is never sent to a client.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Cost on the server, beside training: mixing takes one pass over the pool, and a selection by similarity one more.
    With other selections the mixing pass also computes the Gram matrix for the diagnostics (one matrix product per
    block while the block is in the cache, see docs/performance.md); ``diagnostics_every`` makes that rarer.

    Deviations and choices where the paper is silent:

    - In-order selection counts slots and rounds from 0 (the paper's 1-based Eq. 2 is off by one).
    - If no upload is accepted for a slot, the slot keeps its model and does not take part in that round's mixing.
      It counts in the global mean, which is better with it than without (measured, docs/methods-fedcross.md).
    - A slot whose reply the defence quarantines becomes the mean of the round's other uploads: what looks too long may
      be an honest client's repair of a model that a hostile one has spoiled, and then the slot would stay spoiled.
    - With fewer clients than models (because of ``k``, or because too few clients are connected) the server sends out
      the least recently trained models and mixes these among themselves; the others stay unchanged.
    - When K changes, by schedule or because a run is resumed with another K, the pool is resized so that its mean stays
      the same (:meth:`strategies.pool.pool.Pool.resize`).
    - Propellers, in the paper's first 100 rounds: v1 takes two, the ICDE paper "multiple", neither states weights. This
      project chose P = 2 and ``equal`` because propellers are meant to accelerate. In one round the variance of a pool
      of 10 independent models around their mean falls to .978 of what it was in plain FedCross with alpha .99, to .978
      with ``alpha``, .956 with ``each`` and .259 with ``equal`` (tests/strategies/test_propellers.py).
    - ``first_stage`` comes from the public code. All schedules still count rounds from the run's first round.
    - Models of several widths (`widths`) are this project's: docs/heterogeneous.md. A model takes a share of a narrower
      one on the corner that both have, and keeps the rest; similarity is measured on that corner.
    """

    interchangeable = True
    may_change = frozenset({"clients_per_round", "method.k", "method.diagnostics_every", "method.storage"})

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model."""
        if faults := self.params.faults(self.federation.clients_per_round):
            raise ConfigError(faults)
        layout, k = Layout.of(arrays, self.parameter_names), self._k(1)
        self.pool = self.pool_of_widths(layout, k, self.params.storage)
        self.pool.fill(arrays)
        self._selection = find_selection(self.params.selection)
        self._columns = self.pool.layout.columns(self.params.part)  # the columns that the similarity compares
        #: Slots from the least to the most recently trained one.
        self.queue = list(range(len(self.pool)))
        #: Mean of the last round's uploads, for ``global_model: uploads``.
        self.uploads_mean: Arrays | None = None
        self._started = not self.params.independent_start

    @property
    def independent_models(self) -> int:
        """Number of models that :meth:`start_from` needs; 0 where all start as copies of the initial one."""
        return len(self.pool) if self.params.independent_start else 0

    def start_from(self, models: Iterable[Arrays]) -> None:
        """Start from these models, one for each slot, instead of copies of the initial one.

        Raises
        ------
        ValueError
            If the number of models is not the number of slots.
        """
        for slot, arrays in zip(range(len(self.pool)), models, strict=True):
            self.pool.write(slot, self.corner_of(slot, arrays))
        self._started = True

    @property
    def models(self) -> int:
        """K in the first round."""
        return self._k(1)

    def _k(self, number: int) -> int:
        """Return how many models round `number` has."""
        k = self.params.k
        return self.federation.clients_per_round if k is None else round(k.at(number))

    def _resize(self, k: int) -> None:
        old = len(self.pool)
        self.pool.resize(k)
        if self._compressor is not None:
            self._compressor.forget(range(min(k, old), max(k, old)))
        self.queue = [*range(old, k), *(slot for slot in self.queue if slot < k)]

    def dispatch(self, current: Round) -> list[Payload]:
        """Send row i of the pool to the i-th drawn client; the random order of the draw shuffles models and clients.

        With fewer clients than rows, the least recently trained rows are sent, in the order of the rows.
        """
        if not self._started:
            raise ConfigError("method.independent_start=true needs the models: call start_from(...) after begin(...).")
        if (k := self._k(current.number)) != len(self.pool.rows):
            self._resize(k)
        if self.params.widths:
            return self.dispatch_sized(current)
        slots = sorted(self.queue[: len(current.clients)])
        return [Payload(client, slot, self.pool.model(slot)) for slot, client in zip(slots, current.clients)]

    def stalest(self, slots: Sequence[int]) -> Sequence[int]:
        """Return `slots`, the least recently trained first."""
        return sorted(slots, key=self.queue.index)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Write the uploads into their rows, choose the collaborators, and mix the rows in place."""
        for upload in uploads:
            self.pool.write(upload.slot, upload.arrays)
        members = [upload.slot for upload in uploads]
        if self.doubted:
            self.pool.replace(self.doubted, members)
        trained = set(members)
        self.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        if members and self.params.global_model == "uploads":
            self.uploads_mean = self.pool.mean(members=members)
        mixing, gram = self._mixing(current, members)
        every = self.params.diagnostics_every
        if gram is None and every and current.number % every == 0:
            gram = self.pool.mix_with_gram(mixing, self._columns)
        else:
            self.pool.mix(mixing)
        return chosen(mixing, members) | ({} if gram is None else diagnostics(gram, mixing))

    def _mixing(self, current: Round, members: list[int]) -> tuple[Mixing, Gram | None]:
        """Return this round's mixing matrix, and the Gram matrix of the whole pool if the selection computed it."""
        k, m, params = len(self.pool.rows), len(members), self.params
        if current.number <= params.first_stage:
            return uniform(k, members), None
        alpha = params.alpha.at(current.number)
        if params.mode.at(current.number) == "propellers":
            distances = offsets(m, params.propellers, current.number)
            own = propeller_share(params.propeller_weighting, alpha, len(distances))
            return propellers(k, members, distances, own), None
        if m < 2 or alpha == 1.0:
            return identity(k), None
        measured, gram = self._similarity(members) if self._selection.needs_similarity else (None, None)
        partners = self._selection(Question(m, current.number, current.seed, measured))
        return cross(k, members, partners, alpha), gram

    def _similarity(self, members: list[int]) -> tuple[Gram, Gram | None]:
        """Return the members' similarity matrix, and the whole pool's Gram matrix if the similarity came from it."""
        measure = FROM_GRAM.get(self.params.similarity)
        if isinstance(self.pool, SlicedPool) and measure is not None:
            return self.pool.similarity(measure)[np.ix_(members, members)], self.pool.gram()
        if measure is None:
            return find_similarity(self.params.similarity)(self.pool, members, self.params.part), None
        gram = self.pool.gram(columns=self._columns)
        return measure(gram[np.ix_(members, members)]), gram

    def global_model(self) -> Arrays:
        """Return the uniform mean of the pool or, if so configured, of the last round's uploads."""
        return self.pool.mean() if self.uploads_mean is None else self.uploads_mean

    def state(self) -> State:
        """Return the pool, the queue of slots (least recently trained first) and, if used, the mean of the uploads."""
        arrays = {f"pool.{name}": array for name, array in self.pool.state().items()}
        arrays |= {f"uploads.{name}": array for name, array in (self.uploads_mean or {}).items()}
        return State(arrays, {"queue": self.queue})

    def restore(self, state: State) -> None:
        """Load the pool from `state`; the next round resizes it to the K that is configured now."""
        self.pool.restore({name: state.arrays[f"pool.{name}"] for name in ("rows", "integers")})
        self._started = True
        self.queue = [int(slot) for slot in state.values["queue"]]
        uploads = {name: state.arrays.get(f"uploads.{name}") for name in self.spec}
        self.uploads_mean = {name: array for name, array in uploads.items() if array is not None} or None


def chosen(mixing: Mixing, members: Sequence[int]) -> dict[str, float]:
    """Return how often each model was chosen: the number of *other* models that took a share of it in `mixing`.

    ``chosen_most`` is the largest number, ``chosen_models`` how many models were chosen at all, and ``chosen_I`` the
    number of slot I, for pools of no more than ``COUNTED`` models. Nothing without members.
    """
    if not members:
        return {}
    times = Counter(source for slot in members for source in mixing.rows[slot] if source != slot)
    most = {"chosen_most": float(max(times.values(), default=0)), "chosen_models": float(len(times))}
    if len(mixing.rows) > COUNTED:
        return most
    return most | {f"chosen_{slot}": float(times[slot]) for slot in range(len(mixing.rows))}
