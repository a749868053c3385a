"""Master pull: each round every model of the pool moves a share of the way to the pool's mean."""

from __future__ import annotations

from fedcross.strategies.parts.schedule import Constant, Share
from fedcross.strategies.pool.passes import pull
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.wire.protocol import Round


class MasterPullParams(PooledParams):
    """Settings of master pull, beside those of every pool.

    Parameters
    ----------
    alpha : schedule
        a: weight of a model's own upload in its new value, 0 to 1; the mean of the uploads weighs 1 - a. 0 is FedAvg
        with equal weights, 1 is independent training.
    """

    alpha: Share = Constant(value=10 / 11)

    def remarks(self) -> list[str]:
        """Return warnings about settings that are allowed but unusual."""
        if set(self.alpha.values()) == {1.0}:
            return ["method.alpha=1: no model takes anything from another, this is independent training."]
        return []


class MasterPull(Pooled[MasterPullParams]):
    """What GitFL (Hu et al., RTSS 2023, arXiv 2211.12049) does to its branches, without its asynchrony.

    ``w_i = a v_i + (1 - a) M`` with the master M, the uniform mean of the uploads v. The mean of the pool stays the
    same, its variance falls to ``a^2``. GitFL weighs branch and master c : 1, with c = 10 for branches of equal
    versions, so a = 10/11; MultiSFL mixes 10 : 1 too. The global model is the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Cost on the server: one pass that reads and writes the pool once, in place.

    Choices and deviations: GitFL's versions, control of the branches and choice of clients are about clients of unequal
    speed; here all branches have equal versions. `alpha` may be a schedule. If no upload is accepted for a slot, the
    slot keeps its model, and M is the mean of the others; it counts in the global mean.
    """

    def recombine(self, current: Round, members: list[int]) -> None:
        """Pull the uploads towards their mean."""
        pull(self.pool, members, self.params.alpha.at(current.number))
