"""What holds for all single-model rivals: both trainers agree, client halves combine."""

import numpy as np
import pytest
import torch

from fedcross.client.batched.trainer import train_batched
from fedcross.client.trainer import train
from fedcross.conf.schema import load
from fedcross.strategies.registry import method_class
from tests.support import visits as v

NAMES = ("fedspeed", "fedlesam", "fedgmt", "fedcm", "mofedsam", "fedswa", "fedmoswa", "fedwmsam", "fedvarp", "fedsmoo")
GROUPS = ("momentum", "control", "average", "perturbation")


def sent(net, objective):
    """Return what the server may send: small random vectors, and an average of the model with its buffers."""
    draw = np.random.default_rng(5)
    groups = {group: {n: 0.1 * draw.normal(size=p.shape) for n, p in net.params.items()} for group in GROUPS}
    groups["average"] |= {n: b.numpy().copy() for n, b in net.buffers.items()}
    return {group: groups[group] for group in objective.needs & set(GROUPS)}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedsmoo"])
def test_both_trainers_agree_in_a_first_and_a_second_visit(name):
    objective = method_class(name)().objective()
    assert objective.batchable
    net = v.small_net(norm=True, dropout=True)
    given = {"extras": sent(net, objective), "config": {"mixing": 0.3}}
    clients, state = [v.visit(net, i, n, **given) for i, n in enumerate((12, 5, 7))], {}
    for number in (3, 5):
        for client in clients:
            client.state, client.round = state.get(client.client, {}), number
        together = train_batched(net, objective, [v.work(net, objective, c) for c in clients], v.settings(clip=0.5))
        for one, many in zip(clients, together, strict=True):
            v.enter(net, one)
            prepared = v.prepared(objective, one)
            alone = train(net, objective, one, prepared, v.settings(clip=0.5))
            torch.testing.assert_close(many.flat, alone.flat, rtol=0, atol=1e-10)
            torch.testing.assert_close(many.buffers, dict(alone.buffers), rtol=0, atol=1e-10)
            assert many.loss == pytest.approx(alone.loss, abs=1e-10)
            kept = objective.finish(one, alone, prepared).state if objective.finish else {}
            state[one.client] = {n: np.array(a) for n, a in (kept or {}).items()}


HALVES = ("feddyn", "fedspeed", "fedlesam", "fedgmt", "fedswa", "fedsam", "fedprox")


@pytest.mark.parametrize(
    ("server", "half"), [*(("fedcross", half) for half in HALVES), ("fedavg", "feddyn"), ("fedfan", "fedsam")]
)
def test_client_halves_serve_other_servers(server, half):
    objective = load([f"method={server}", f"objective={half}"]).new_objective()
    assert type(objective) is method_class(half).Objective
