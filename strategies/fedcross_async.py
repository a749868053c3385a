"""FedCross without waiting: each slot is mixed and sent again as soon as its upload is there."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedcross.strategies.fedcross import Alpha
from fedcross.strategies.method import Round
from fedcross.strategies.parts.async_pool import AsyncPool, AsyncPoolState
from fedcross.strategies.parts.pooled import PooledParams
from fedcross.strategies.parts.schedule import Constant
from fedcross.strategies.pool.mixing import (
    FROM_GRAM,
    SELECTIONS,
    Matrix,
    Mixing,
    Part,
    Question,
    cross,
    identity,
    similarity,
)


class FedCrossAsyncParams(PooledParams):
    """Settings of FedCross without waiting, beside those of every pool.

    Parameters
    ----------
    alpha : schedule
        Weight of a model's own upload in its new value, 0.5 to 1; with 1 the models train independently. Its rounds are
        those of the slot: the number of its uploads.
    selection, similarity, part : str
        As in FedCross, among the slots that have had an upload.
    gap : {"inverse", "none"}
        What a collaborator with g uploads less than the own slot weighs: (1 - alpha)/(1 + g), or 1 - alpha whatever g.
    """

    alpha: Alpha = Constant(value=0.99)
    selection: Literal["in_order", "highest_similarity", "lowest_similarity", "random", "least_similar_derangement"] = (
        "lowest_similarity"
    )
    similarity: Literal["cosine", "paper", "chunked", "euclidean", "manhattan"] = "cosine"
    part: Part = "parameters"
    gap: Literal["inverse", "none"] = "inverse"


class FedCrossAsync(AsyncPool[FedCrossAsyncParams, AsyncPoolState]):
    """FedCross with one visit under way for each slot; this project's own method, nobody has published it.

    When the upload v_i of slot i arrives, the selection picks a collaborator co(i) among the slots that have had an
    upload, and the slot sends ``w_i = alpha_i v_i + (1 - alpha_i) v_co(i)`` at once to another client. With n_i uploads
    of slot i so far, ``alpha_i = 1 - (1 - alpha)/(1 + max(0, n_i - n_co))``: a collaborator that is behind weighs less.
    A slot waits for its own visit only, so no model is stale to itself. The global model is the uniform mean of what
    the slots sent last.

    Uploads that arrive at the same virtual time are all written before any collaborator is chosen. If all visits take
    equally long and none is lost, all versions are equal in every group, and the method is FedCross to the bit.

    State: two pools of K models, the uploads and what was sent; clients keep none. Wire: one model down, one up.

    Cost on the server: for each upload one pass over two uploads, and with a selection by similarity one over the pool.

    Choices: `alpha` and in-order and random selection count the uploads of the slot in place of rounds. A lost visit
    changes nothing, and the slot's model goes to another client; its last upload may still be a collaborator, whereas
    FedCross leaves lost slots out of a round's mixing.
    """

    def mixing(self, state: AsyncPoolState, round: Round, slots: list[int]) -> Mixing:
        """Choose collaborators for `slots` and weigh them by how far they are behind."""
        versions, k = state.versions, len(state.pool)
        members = [slot for slot, version in enumerate(versions) if version]
        m = len(members)
        if m < 2:
            return identity(k)
        selection = SELECTIONS[self.params.selection]
        measured = self._similarity(state, members) if selection.needs_similarity else None
        partners, alphas = np.arange(m), [1.0] * m
        for version in sorted({versions[slot] for slot in slots}):
            alpha = self.params.alpha.at(version)
            found = selection(Question(m, version, round.seed, measured))
            for i, slot in enumerate(members):
                if slot in slots and versions[slot] == version and alpha < 1:
                    partners[i] = found[i]
                    alphas[i] = self._share(alpha, version - versions[members[int(found[i])]])
        return cross(k, members, partners, alphas)

    def _share(self, alpha: float, behind: int) -> float:
        """Return alpha_i for a collaborator that is `behind` by so many uploads."""
        return alpha if behind <= 0 or self.params.gap == "none" else 1 - (1 - alpha) / (1 + behind)

    def _similarity(self, state: AsyncPoolState, members: list[int]) -> Matrix:
        """Return the similarity matrix of the members' uploads; of the whole pool's, as FedCross computes it."""
        params, pool = self.params, state.uploads
        if params.similarity not in FROM_GRAM:
            return similarity(params.similarity, pool, members, params.part)
        gram = pool.gram(columns=pool.layout.columns(params.part))
        return FROM_GRAM[params.similarity](gram[np.ix_(members, members)])
