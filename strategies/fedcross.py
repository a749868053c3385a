"""FedCross: K middleware models, each trained by another client each round, then cross-aggregated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strategies import similarity
from strategies.arrays import Layout
from strategies.base import Method, State
from strategies.mixing import cross
from strategies.pool import Pool, diagnostics
from strategies.protocol import Payload, Round, Upload
from strategies.selection import Question, find_selection
from strategies.wire import Arrays
from tasks.settings import Settings


class FedCross(Method):
    """Hu et al., FedCross: Towards Accurate Federated Learning via Multi-Model Cross-Aggregation, ICDE 2024.

    ``w_i = alpha v_i + (1 - alpha) v_co(i)`` for every upload v_i at once, co(i) from the selection. All K models start
    as copies of one random network. The global model is the uniform mean of the mixed pool; no client ever gets it.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Deviations: in-order selection counts slots and rounds from 0 (the paper's 1-based Eq. 2 is off by one). A slot
    whose client was lost keeps its model and takes no part in that round's mixing (the paper is silent).
    """

    class Params(Settings):
        """``alpha`` in [0.5, 1]: the share a model keeps of itself; 1 is independent training."""

        alpha: float = Field(0.99, ge=0.5, le=1.0)
        selection: Literal["in_order", "highest_similarity", "lowest_similarity"] = "lowest_similarity"

        def remarks(self) -> list[str]:
            """Return what is allowed but unusual."""
            if self.alpha == 1.0:
                return ["method.alpha=1: no model takes anything from another, this is independent training."]
            return []

    params: Params

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model."""
        self.pool = Pool(Layout.of(arrays, self.parameter_names), self.federation.clients_per_round)
        self.pool.fill(arrays)

    def dispatch(self, current: Round) -> list[Payload]:
        """Send row i of the pool to the i-th drawn client: the draw's order is the shuffle."""
        return [Payload(client, slot, self.pool.model(slot)) for slot, client in enumerate(current.clients)]

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the uploads into their rows, choose partners, mix in place."""
        for upload in uploads:
            self.pool.write(upload.slot, upload.arrays)
        members = [upload.slot for upload in uploads]
        if not members:
            return diagnostics(self.pool.gram())
        selection = find_selection(self.params.selection)
        gram = self.pool.gram()
        measured = similarity.cosine(gram[members][:, members]) if selection.needs_similarity else None
        partners = selection(Question(len(members), current.number, current.seed, measured))
        mixing = cross(len(self.pool), members, partners, self.params.alpha)
        self.pool.mix(mixing)
        return diagnostics(gram, mixing)

    def global_model(self) -> Arrays:
        """Return the uniform mean of the pool."""
        return self.pool.mean()

    def state(self) -> State:
        """Return the pool."""
        return State({f"pool.{name}": array for name, array in self.pool.state().items()})

    def restore(self, state: State) -> None:
        """Take over the pool."""
        self.pool.restore({name.removeprefix("pool."): array for name, array in state.arrays.items()})
