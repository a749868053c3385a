"""Hand-made federations for numeric tests of methods: tiny float64 models, full batches, no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedcross.client.app import app as client_app
from fedcross.client.flat_model import ModuleNet
from fedcross.client.request import state_root
from fedcross.client.state import StateStore
from fedcross.client.trainer import train
from fedcross.conf.schema import Train
from fedcross.core.errors import StorageError
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Batch, Objective, Outcome, Visit
from fedcross.strategies.registry import method_class
from fedcross.strategies.wire.records import Arrays, spec_of
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models._split import Split
from tests.support.federation import run, same, session
from tests.support.game import Game

Data = Sequence[tuple[Any, Any]]
#: Two full-batch steps of length .5, no momentum.
TWO_STEPS = Train(lr=0.5, epochs=2, batch=1000)


def weights(model: nn.Module) -> int:
    """Return the number of trainable scalars of `model`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def two_layers(features: Any, classifier: Any) -> Split:
    """Return float64 ``classifier @ (features @ x)`` without biases; no features layer if `features` is None."""
    v = torch.tensor(classifier, dtype=torch.float64)
    last = nn.Linear(v.shape[1], v.shape[0], bias=False, dtype=torch.float64)
    last.weight.data.copy_(v)
    first: nn.Module = nn.Identity()
    if features is not None:
        f = torch.tensor(features, dtype=torch.float64)
        first = nn.Linear(f.shape[1], f.shape[0], bias=False, dtype=torch.float64)
        first.weight.data.copy_(f)
    return Split(first, last)


def open_visit(net: ModuleNet, x: Any, y: Any, **values: Any) -> Visit:
    """Return a visit to a client with data (x, y), starting from what `net` holds."""
    labels = torch.as_tensor(y, dtype=torch.int64)
    inputs = torch.as_tensor(x, dtype=torch.float64)
    settled = {"extras": {}, "config": {}, "state": {}, "client": 0, "round": 1, "rounds": 1, "seed": 0, "lr": 0.5}
    settled |= values if "classes" in values else {"classes": net.module.classifier.out_features, **values}
    params = {name: p.detach().clone() for name, p in net.params.items()}
    buffers = {name: b.clone() for name, b in net.buffers.items()}
    return Visit(net=net, params=params, buffers=buffers, inputs=Inputs(inputs), y=labels, **settled)


def trained(net: ModuleNet, objective: Objective, visit: Visit, settings: Train = TWO_STEPS) -> Outcome:
    """Train the model in `net` as a client does; return what it sends and keeps beside the model."""
    prepared = objective.prepare(visit) if objective.prepare else {}
    found = train(net, objective, visit, prepared, settings)
    return objective.finish(visit, found, prepared) if objective.finish else Outcome()


def play(
    name: str, module: Split, data: Data, rounds: int = 1, local: Train = TWO_STEPS, **own: Any
) -> tuple[Game, dict[int, Arrays], list[Arrays]]:
    """Play `rounds` rounds of method `name` with parameters `own` over clients with `data`, all drawn.

    Returns the method, what each client keeps, and the last round's uploads by client.
    """
    net = ModuleNet(module, torch.device("cpu"))
    initial = {name: array.copy() for name, array in net.read().items()}
    method = Game(method_class(name), initial, set(net.params), clients_per_round=len(data), rounds=rounds, **own)
    objective = method.method.objective()
    kept: dict[int, Arrays] = {}
    uploads: list[Upload] = []
    for number in range(1, rounds + 1):
        current = Round(number, 0, method.sample(number, range(len(data))), 0)
        uploads = []
        for payload in method.dispatch(current):
            x, y = data[payload.client]
            state, extras = kept.get(payload.client, {}), dict(payload.extras)
            net.load(objective.start(payload.arrays, state) if objective.start else payload.arrays)
            asked = {"config": dict(payload.config), "round": number, "rounds": rounds, "lr": local.lr}
            visit = open_visit(net, x, y, state=state, extras=extras, **asked)
            outcome = trained(net, objective, visit, local)
            sent = {group: {n: np.array(a) for n, a in arrays.items()} for group, arrays in outcome.extras.items()}
            assert {group: spec_of(arrays) for group, arrays in sent.items()} == dict(payload.returns)
            if outcome.state is not None:
                kept[payload.client] = {n: np.array(a) for n, a in outcome.state.items()}
            arrays = {n: a.copy() for n, a in net.read().items()}  # the wire copies, `read` gives views
            uploads.append(Upload(payload.client, payload.slot, arrays, sent, len(visit.y), {}))
        method.aggregate(current, uploads)
    by_client = {upload.client: upload.arrays for upload in uploads}
    return method, kept, [by_client[client] for client in sorted(by_client)]


def descent(v: Any, z: Any, y: int) -> tuple[Any, Any]:
    """Return the gradients of cross-entropy of logits ``v @ z``: with respect to v, and to z."""
    scores = v @ z
    p = np.exp(scores) / np.exp(scores).sum()
    p[y] -= 1
    return np.outer(p, z), v.T @ p


def stacked(*trees: Any) -> Any:
    """Return equal trees of dicts, tuples and tensors as one tree of stacked tensors."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: stacked(*(tree[name] for tree in trees)) for name in first}
    if isinstance(first, tuple):
        return tuple(stacked(*items) for items in zip(*trees, strict=True))
    return torch.stack(trees)


def check_batched(objective: Objective, visits: Sequence[dict[str, Any]], real: int = 3, padded: int = 5) -> None:
    """Assert that loss and gradient under vmap over two clients are those of each client alone, in float64.

    Each client has `real` examples of four numbers and three classes; under vmap they are padded to `padded` rows and
    masked. `visits` are the fields of both visits.
    """
    assert objective.batchable
    generator = torch.Generator().manual_seed(1)
    module = Split(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3)).double()
    net = ModuleNet(module, torch.device("cpu"))
    clients = []
    for fields in visits:
        net.flat.copy_(torch.randn(net.flat.shape, generator=generator, dtype=torch.float64))
        x = torch.randn(real, 4, generator=generator, dtype=torch.float64)
        visit = open_visit(net, x, torch.randint(3, (real,), generator=generator), **fields)
        prepared = objective.prepare(visit) if objective.prepare else {}
        moved = {n: p + torch.randn(p.shape, generator=generator).double() for n, p in visit.params.items()}
        clients.append((moved, visit.buffers, visit.x, visit.y, prepared))

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor, prepared: Any, mask: Tensor | None = None) -> Tensor:
        return objective.loss(net, params, buffers, Batch(x, y, mask), prepared)

    slopes = torch.func.grad_and_value(loss)
    alone = [slopes(*client) for client in clients]
    padding = torch.full((padded - real, 4), 7.0, dtype=torch.float64)
    rows = [
        (p, b, torch.cat([x, padding]), torch.cat([y, y.new_zeros(padded - real)]), e, torch.arange(padded) < real)
        for p, b, x, y, e in clients
    ]
    gradients, values = torch.func.vmap(slopes)(*(stacked(*items) for items in zip(*rows, strict=True)))
    for i, (gradient, value) in enumerate(alone):
        torch.testing.assert_close(values[i], value, rtol=1e-12, atol=1e-14)
        for name, slope in gradient.items():
            torch.testing.assert_close(gradients[name][i], slope, rtol=1e-10, atol=1e-13)
    _check_flat(objective, [(p, e) for p, _, _, _, e in clients])


def _check_flat(objective: Objective, clients: list[tuple[Any, Any]]) -> None:
    """Assert that the closed-form gradient of two stacked clients is that of each alone."""
    if not objective.gradient:
        return
    flats = [torch.cat([p.reshape(-1) for p in params.values()]) for params, _ in clients]
    alone = [objective.gradient(flat, prepared) for flat, (_, prepared) in zip(flats, clients)]
    if alone[0] is None:
        return
    together = torch.func.vmap(objective.gradient)(torch.stack(flats), stacked(*(prepared for _, prepared in clients)))
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)  # type: ignore[arg-type]


def check_resume(folder: Any, *overrides: str) -> None:
    """Assert that a run that crashed in its third round and was resumed ends as one that was left in peace."""
    whole = run(folder / "whole", *overrides, "rounds=4")
    half = session(folder / "half", *overrides, "rounds=4")
    half.checkpoints.save = _crash_at_3(half.checkpoints.save)
    with pytest.raises(StorageError, match="power cut"):
        half.execute()
    resumed = run(folder / "half", *overrides, "rounds=4", f"resume={folder / 'half'}")
    before, after = whole.driver.checkpoint(), resumed.driver.checkpoint()
    assert same(before.arrays, after.arrays)
    assert before.values == after.values
    for client, visit in whole.driver.ledger.clients.accepted.items():
        assert same(states(whole, client, visit), states(resumed, client, visit))


def _crash_at_3(save: Callable[..., None]) -> Callable[..., None]:
    def crashing(number: int, *rest: Any) -> None:
        if number == 3:
            raise StorageError("power cut")
        save(number, *rest)

    return crashing


def states(of: Any, client: int, visit: int) -> Arrays:
    """Return what `client` kept from `visit` in a run on this machine."""
    return StateStore(state_root(), of.run, client).load(visit)


def forgetful(lost: Callable[[int, int], bool]) -> ClientApp:
    """Return the client app whose finished work is lost on its way back where `lost(client, round)` says so."""
    app = ClientApp()

    @app.train()
    def train_then_fail(message: Any, context: Any) -> Any:
        reply = client_app(message, context)
        asked = message.content.config_records["config"]
        if lost(asked["client"], asked["round"]):
            raise RuntimeError("link down")
        return reply

    return app
