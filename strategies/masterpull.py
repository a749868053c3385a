"""Master pull: each round every model of the pool moves a share of the way to the pool's mean."""

from fedcross.strategies.method import Round
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.schedule import Share


class MasterPullParams(PooledParams):
    alpha: Share = 10 / 11


class MasterPull(Pooled[MasterPullParams]):
    """What GitFL (Hu et al., RTSS 2023, arXiv 2211.12049) does to its branches, without its asynchrony.

    ``w_i = a v_i + (1 - a) M`` with the master M, the uniform mean of the uploads v. The mean of the pool stays the
    same, its variance falls to ``a^2``. GitFL weighs branch and master c : 1, with c = 10 for branches of equal
    versions, so a = 10/11; MultiSFL mixes 10 : 1 too. The global model is the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Deviations: all branches have equal versions. A lost slot keeps its model and counts in the global mean, not in M.
    """

    def recombine(self, state: PoolState, round: Round, members: list[int]) -> None:
        mean, _ = state.pool.mean_row(members)
        state.pool.pull(self.params.at("alpha", round.number), mean[None], members)
