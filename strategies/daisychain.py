"""Daisy chaining (FedDC): models wander from client to client and are averaged every few rounds only."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.pool.mixing import routing, uniform
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.wire.protocol import Round


class DaisyChainParams(PooledParams):
    """Settings of daisy chaining, beside those of every pool.

    Parameters
    ----------
    daisy : int
        d: every d rounds the models are permuted over the slots.
    average : int
        b: every b rounds all slots become the mean of the uploads; 1 is FedAvg with equal weights.
    """

    daisy: int = Field(1, ge=1)
    average: int = Field(10, ge=1)


class DaisyChain(Pooled[DaisyChainParams]):
    """Kamp, Fischer and Vreeken, Federated Learning from Small Datasets (FedDC), ICLR 2023, arXiv 2110.03469.

    Another FedDC is Gao et al., CVPR 2022, which corrects local drift; it is not this method.

    Each slot's model is trained where it is. In rounds b, 2b, ... every slot becomes the uniform mean of the uploads;
    in the other rounds d, 2d, ... a random permutation moves the models over the slots. The global model is the uniform
    mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Choices and deviations:

    - The drawn clients are sorted, so that with all clients in every round slot i belongs to client i and a model stays
      there until the next permutation, as in the paper. If clients are drawn anew each round, the models change their
      clients in every round, whatever d is.
    - If no upload is accepted for a slot, the slot keeps its model and takes no part in that round's permutation or
      mean; it counts in the global mean.
    - The paper's models move between clients through the server, so a round costs as much as one of FedAvg, and so it
      does here.
    """

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and sort the clients, so that slots stay with their clients if all take part."""
        return tuple(sorted(super().sample(number, available)))

    def recombine(self, current: Round, members: list[int]) -> None:
        """Average or permute, as the round's number says."""
        if current.number % self.params.average == 0:
            self.pool.mix(uniform(len(self.pool), members))
        elif current.number % self.params.daisy == 0:
            order = stream(current.seed, "daisy", current.number).permutation(len(members))
            self.pool.mix(routing(len(self.pool), members, order))
