"""FedCross without waiting: each slot is mixed and sent again as soon as its upload is there."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.asynchronous.pool import AsyncPool
from fedcross.strategies.fedcross import Alpha
from fedcross.strategies.parts.schedule import Constant
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.pool.mixing import Mixing, cross, identity
from fedcross.strategies.pool.selection import Question, find_selection
from fedcross.strategies.pool.similarity import FROM_GRAM, Part, find_similarity
from fedcross.strategies.round.pooled import PooledParams
from fedcross.strategies.wire.protocol import Round


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


class FedCrossAsync(AsyncPool[FedCrossAsyncParams]):
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

    def setup(self, arrays: Arrays) -> None:
        """Fill the pools and look up the selection."""
        super().setup(arrays)
        self._selection = find_selection(self.params.selection)
        self._columns = self.pool.layout.columns(self.params.part)

    def mixing(self, current: Round, slots: list[int]) -> tuple[Mixing, dict[str, float]]:
        """Choose collaborators for `slots` and weigh them by how far they are behind."""
        members = [slot for slot, version in enumerate(self.versions) if version]
        m, versions = len(members), self.versions
        if m < 2:
            return identity(self.slots), {}
        measured = self._similarity(members) if self._selection.needs_similarity else None
        partners, alphas = np.arange(m), [1.0] * m
        for version in sorted({versions[slot] for slot in slots}):
            alpha = self.params.alpha.at(version)
            found = self._selection(Question(m, version, current.seed, measured))
            for i, slot in enumerate(members):
                if slot in slots and versions[slot] == version and alpha < 1:
                    partners[i] = found[i]
                    alphas[i] = self._share(alpha, version - versions[members[int(found[i])]])
        return cross(self.slots, members, partners, alphas), {}

    def _share(self, alpha: float, behind: int) -> float:
        """Return alpha_i for a collaborator that is `behind` by so many uploads."""
        return alpha if behind <= 0 or self.params.gap == "none" else 1 - (1 - alpha) / (1 + behind)

    def _similarity(self, members: list[int]) -> NDArray[np.float64]:
        """Return the similarity matrix of the members' uploads."""
        measure = FROM_GRAM.get(self.params.similarity)
        if measure is None:
            return find_similarity(self.params.similarity)(self.uploads, members, self.params.part)
        gram = self.uploads.gram(columns=self._columns)
        return measure(gram[np.ix_(members, members)])
