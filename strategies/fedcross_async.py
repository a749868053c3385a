"""FedCross without waiting: each slot is mixed and sent again as soon as its upload is there."""

from typing import Literal

import numpy as np

from fedcross.strategies.fedcross import Alpha, Selection, Similarity
from fedcross.strategies.method import Round
from fedcross.strategies.parts.pooled import AsyncPool, AsyncPoolState, PooledParams
from fedcross.strategies.pool.mixing import BY_SIMILARITY, Matrix, Part, cross, select, similarity


class FedCrossAsyncParams(PooledParams):
    alpha: Alpha = 0.99
    selection: Selection = "lowest_similarity"
    similarity: Similarity = "cosine"
    part: Part = "parameters"
    gap: Literal["inverse", "none"] = "inverse"

    def own(self, alpha: float, behind: int) -> float:
        """Return alpha_i for a collaborator that is `behind` by so many uploads."""
        return alpha if behind <= 0 or self.gap == "none" else 1 - (1 - alpha) / (1 + behind)


class FedCrossAsync(AsyncPool[FedCrossAsyncParams]):
    """FedCross with one visit under way for each slot; this project's own method, nobody has published it.

    When the upload v_i of slot i arrives, the selection picks a collaborator co(i) among the slots that have had an
    upload, and the slot sends ``w_i = alpha_i v_i + (1 - alpha_i) v_co(i)`` at once to another client. With n_i uploads
    of slot i so far, ``alpha_i = 1 - (1 - alpha)/(1 + max(0, n_i - n_co))``: a collaborator that is behind weighs less.
    The global model is the uniform mean of what the slots sent last.

    Uploads of the same virtual time are all written before any collaborator is chosen. If all visits take equally long
    and none is lost, the method is FedCross to the bit.

    State: two pools of K models, the uploads and what was sent; clients keep none. Wire: one model down, one up.

    Choices: `alpha` and in-order and random selection count the slot's uploads in place of rounds. After a lost visit
    the slot's model goes to another client; its last upload may still be a collaborator, unlike in FedCross.
    """

    def mixing(self, state: AsyncPoolState, round: Round, slots: list[int]) -> Matrix:
        versions, params = state.versions, self.params
        members = [slot for slot, version in enumerate(versions) if version]
        m, measured = len(members), None
        if m > 1 and params.selection in BY_SIMILARITY:
            measured, _ = similarity(params.similarity, state.uploads, members, params.part)
        collaborators, alphas = np.arange(m), [1.0] * m
        for version in sorted({versions[slot] for slot in slots}):
            alpha, found = params.at("alpha", version), select(params.selection, m, version, round.seed, measured)
            for i, slot in enumerate(members):
                if slot in slots and versions[slot] == version and alpha < 1:
                    collaborators[i], behind = found[i], version - versions[members[found[i]]]
                    alphas[i] = params.own(alpha, behind)
        return cross(len(state.pool), members, collaborators, alphas)
