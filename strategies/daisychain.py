"""Daisy chaining (FedDC): models wander from client to client and are averaged every few rounds only."""

from collections.abc import Sequence

from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.method import Round
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.pool.mixing import cross, uniform


class DaisyChainParams(PooledParams):
    daisy: int = Field(1, ge=1)
    average: int = Field(10, ge=1)


class DaisyChain(Pooled[DaisyChainParams]):
    """Kamp, Fischer and Vreeken, Federated Learning from Small Datasets (FedDC), ICLR 2023, arXiv 2110.03469.

    Not the FedDC of Gao et al., CVPR 2022, which corrects local drift.

    In rounds b, 2b, ... every slot becomes the uniform mean of the uploads; in the other rounds d, 2d, ... a random
    permutation moves the models over the slots. The global model is the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Deviations: the drawn clients are sorted, so with all clients in every round a model stays at its client until the
    next permutation, as in the paper; otherwise models change their clients in every round. A lost slot keeps its model
    and takes no part in that round's permutation or mean; it counts in the global mean.
    """

    def sample(self, state: PoolState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(round.clients))

    def recombine(self, state: PoolState, round: Round, members: list[int]) -> None:
        if round.number % self.params.average == 0:
            state.pool.mix(uniform(len(state.pool), members))
        elif round.number % self.params.daisy == 0:
            order = stream(round.seed, "daisy", round.number).permutation(len(members))
            state.pool.mix(cross(len(state.pool), members, order, 0.0))
