"""FedDyn: a linear and a quadratic term make the clients' own optima those of the whole federation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedcross.strategies.parts.duals import Dual, DualParams, DualServer


class FedDynParams(DualParams):
    """Settings of FedDyn: ``alpha``, the weight of its term, and ``global_model``, the model to evaluate."""

    alpha: float = Field(0.01, ge=0)
    global_model: Literal["uploads", "server"] = "uploads"


class FedDyn(DualServer[FedDynParams]):
    """Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.

    Client u minimises ``f_u(w) + a <h_u, w> + (a/2) ||w - G||^2`` and then sets ``h_u += w_u - G``. The server sets
    ``G = mean_S w_u + mean_N h_u``. All h_u start at zero. With ``g_u = -a h_u`` and ``h = -a mean_N h_u`` these are
    the paper's equations.

    State: G, the last uploads' mean, and the sum of all h_u; every client keeps h_u. Wire: one model down, one up. N is
    the largest number of clients that were ever connected at a draw.

    Compared with the authors' code (alpemreacar/FedDyn): it divides a by a client's share of the examples times N; here
    all clients have one a. It evaluates the mean of the uploads, as ``global_model=uploads`` does. FL-Simulator
    evaluates G.

    Deviations: the terms act on parameters; statistics of batch normalisation are averaged. If a client's upload is
    lost, its h_u stays as it was. A client that loses its disk starts again at zero, and its old share stays in the
    sum. The reported training loss is the cross-entropy alone.
    """

    Objective = Dual
