"""FedVARP: the server keeps every client's last update and corrects the mean of those that did not answer."""

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.parts.single_model import ModelState, SingleModel


class FedVARPParams(Settings):
    server_lr: float = Field(1.0, gt=0)


@dataclass
class FedVARPState(ModelState):
    updates: dict[int, Arrays] = field(default_factory=dict)
    total: Arrays = field(default_factory=dict)


class FedVARP(SingleModel[FedVARPParams, FedVARPState]):
    """Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation, UAI 2022.

    With the updates ``d_u = w_u - G`` the server sets ``G += s (mean_S (d_u - y_u) + mean_N y_u)`` and then
    ``y_u = d_u`` for the clients of the round. All y_u start at zero; s is the server's learning rate. If all clients
    take part, or in the first round of a client, y_u drops out: then this is FedAvg with a uniform mean.

    State: G, y_u of every client that has answered (N models), and their sum. Wire: FedAvg's.
    Deviations: corrected are parameters; statistics of batch normalisation are averaged. A lost client keeps its y_u.
    """

    weighting = "uniform"
    zeros = ("total",)

    def step(self, state: FedVARPState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        count = max(state.population, len(uploads))
        moves = [{name: upload.arrays[name] - sent[name] for name in state.total} for upload in uploads]
        for name, total in state.total.items():
            before = [state.updates[u.client][name] if u.client in state.updates else 0 * total for u in uploads]
            changes = np.stack([move[name] - old for move, old in zip(moves, before)])
            step = changes.mean(0) + total / count
            state.model[name] = np.asarray(sent[name] + self.params.server_lr * step, dtype=total.dtype)
            state.total[name] = np.asarray(total + changes.sum(0), dtype=total.dtype)
        state.updates |= {upload.client: move for upload, move in zip(uploads, moves)}
