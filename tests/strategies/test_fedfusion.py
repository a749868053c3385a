"""FedFusion: operators by hand, the first step, cache, lambda's average, wire, resume, vmap."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.batched.stack import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import Train, load
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedfusion import REFERENCE, SHARE, Blend, Concatenate, FedFusion, Fusion, frozen
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Batch, Objective, Trained, Visit
from fedcross.strategies.registry import build_network
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models import create
from fedcross.tasks.models._split import Split
from fedcross.tasks.models.dropout import Dropout, dropout_names, seed_dropout
from tests.support.federation import run
from tests.support.game import Game

EXAMPLES = 10


def small(norm: bool = False) -> Split:
    """A network with an extractor of 2 channels, seeded; with batch normalisation on request."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        layers = [nn.Conv2d(1, 2, 3), *([nn.BatchNorm2d(2)] if norm else []), nn.MaxPool2d(2), nn.ReLU()]
        features = nn.Sequential(
            OrderedDict(
                extractor=nn.Sequential(*layers), flatten=nn.Flatten(), fc1=nn.Linear(8, 6), dropout1=Dropout(0.3)
            )
        )
        return Split(features, nn.Linear(6, 3), extractor_channels=2)


def visit_of(net: ModuleNet, client: int = 0, **changes: object) -> Visit:
    """A visit of `client` with 10 random examples of 6x6 pixels."""
    generator = torch.Generator().manual_seed(5 + client)
    values = {
        "net": net,
        "params": {n: p.detach().clone() for n, p in net.params.items()},
        "buffers": {n: b.clone() for n, b in net.buffers.items()},
        "extras": {}, "config": {}, "state": {},
        "inputs": Inputs(torch.randn(EXAMPLES, 1, 6, 6, generator=generator)),
        "y": torch.arange(EXAMPLES) % 3,
        "client": client, "round": 1, "rounds": 9, "seed": 1, "classes": 3, "lr": 0.2,
    }  # fmt: skip
    return Visit(**{**values, **changes})  # type: ignore[arg-type]


def visited(objective: Objective, module: nn.Module, epochs: int, batch: int) -> dict[str, np.ndarray]:
    """Train `module` through one visit and return its weights."""
    net = ModuleNet(module, torch.device("cpu"))
    visit = visit_of(net)
    seed_dropout(net.module, 11)
    prepared = objective.prepare(visit) if objective.prepare else {}
    train(net, objective, visit, prepared, Train(lr=1, momentum=0.9, weight_decay=0.01, epochs=epochs, batch=batch))
    return net.read()


def fused(name: str, norm: bool = False, **values: object) -> tuple[Fusion, nn.Module]:
    params = FedFusion.Params.model_validate({"operator": name, **values})
    return Fusion(params), build_network(FedFusion(params), small(norm), 1)


# ---- operators -----------------------------------------------------------------------------------------------------


def test_blend_by_hand():
    # One example, two channels of one pixel: E_l = (1, 2), E_g = (5, 10), lambda = (1/4, -1/2).
    # Channel 1: 5/4 + 3/4 = 2. Channel 2: -5 + 3 = -2. d out / d lambda = E_g - E_l = (4, 8);
    # d out / d E_l = 1 - lambda = (3/4, 3/2).
    local = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).requires_grad_()
    reference = torch.tensor([5.0, 10.0]).view(1, 2, 1, 1)
    blend = Blend(2)
    with torch.no_grad():
        blend.share.copy_(torch.tensor([0.25, -0.5]))
    out = blend(local, reference)
    assert out.flatten().tolist() == [2.0, -2.0]
    out.sum().backward()
    assert blend.share.grad.tolist() == [4.0, 8.0]
    assert local.grad.flatten().tolist() == [0.75, 1.5]


def test_single_by_hand():
    # lambda = 1/4 for both channels: (5/4 + 3/4, 10/4 + 6/4) = (2, 4); its gradient is 4 + 8 = 12.
    single = Blend(1)
    with torch.no_grad():
        single.share.fill_(0.25)
    out = single(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([5.0, 10.0]).view(1, 2, 1, 1))
    assert out.flatten().tolist() == [2.0, 4.0]
    out.sum().backward()
    assert single.share.grad.tolist() == [12.0]


def test_conv_by_hand():
    # Joined (E_l; E_g) = (1, 2, 5, 10). Row 1 = (1, 0, 0, 1), bias 1/2: 1 + 10 + .5 = 11.5. Row 2 = (0, 2, -1, 0), bias
    # -1: 4 - 5 - 1 = -2.
    conv = Concatenate(2)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[1.0, 0, 0, 1], [0, 2, -1, 0]]).view(2, 4, 1, 1))
        conv.bias.copy_(torch.tensor([0.5, -1.0]))
    out = conv(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([5.0, 10.0]).view(1, 2, 1, 1))
    assert out.flatten().tolist() == [11.5, -2.0]


def test_added_weights_depend_on_the_seed_only():
    params = FedFusion.Params(operator="conv")
    before = torch.get_rng_state()
    first, again, other = (build_network(FedFusion(params), small(), seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    name = "features.fusion.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_model_without_an_extractor_is_refused():
    config = load(["task=digits", "model=mlp", "method=fedfusion"])
    task = config.module("task").load(config.task)
    with pytest.raises(ConfigError, match="extractor_channels=0"):
        build_network(FedFusion(config.method), create("mlp", config.model, task, 1), 1)


# ---- the client ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multi", "single"])
@pytest.mark.parametrize("cache_mib", [0.0, 1.0])
def test_first_step_is_fedavgs_to_the_bit(name: str, cache_mib: float):
    # E_g = E_l and lambda = 0: fused features are E_l, their gradient passes unchanged, lambda's is <g, E_g - E_l> = 0.
    one = {"epochs": 1, "batch": EXAMPLES}
    theirs = visited(Objective(FedAvg.Params()), small(), **one)
    objective, network = fused(name, cache_mib=cache_mib)
    ours = visited(objective, network, **one)
    for key, value in theirs.items():
        assert np.array_equal(ours[key], value), key
    assert np.abs(ours[SHARE]).max() < 1e-6
    # and it is no accident: after more steps lambda has moved and so has everything else
    later = visited(*fused(name, cache_mib=cache_mib), epochs=3, batch=4)
    assert np.abs(later[SHARE]).max() > 1e-4
    plain = visited(Objective(FedAvg.Params()), small(), epochs=3, batch=4)
    assert not np.array_equal(later["classifier.weight"], plain["classifier.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "multi", "single"])
@pytest.mark.parametrize("norm", [False, True])
def test_cached_and_uncached_training_agree(name: str, norm: bool):
    cached = visited(*fused(name, norm, cache_mib=1.0), epochs=3, batch=4)
    uncached = visited(*fused(name, norm, cache_mib=0.0), epochs=3, batch=4)
    for key, value in cached.items():
        np.testing.assert_allclose(value, uncached[key], rtol=1e-5, atol=1e-6)


def test_when_features_are_cached():
    # 10 examples x 2 channels x 2 x 2 pixels x 4 bytes = 320 bytes.
    limit = 320 / 2**20
    for values, augmented, expected in [
        ({"cache_mib": limit}, False, True),
        ({"cache_mib": limit * 0.99}, False, False),
        ({"cache_mib": 100.0}, True, False),
    ]:
        objective, network = fused("multi", **values)
        visit = visit_of(ModuleNet(network, torch.device("cpu")), augmented=augmented)
        prepared = objective.prepare(visit)
        assert ("cache" in prepared) == expected
        if expected:
            assert prepared["cache"].nbytes == 320


def test_frozen_extractor_is_the_received_one_in_evaluation_behaviour():
    objective, network = fused("conv", norm=True)
    net = ModuleNet(network, torch.device("cpu"))
    visit = visit_of(net)
    prepared = objective.prepare(visit)
    statistics = {name: b.clone() for name, b in net.buffers.items()}
    # By hand: the extractor with running mean 0 and variance 1, whatever the batch holds.
    conv = network.features.extractor[0]
    plain = nn.functional.relu(nn.functional.max_pool2d(conv(visit.x) / np.sqrt(1 + 1e-5), 2)).detach()
    torch.testing.assert_close(prepared["cache"], plain)
    with torch.no_grad():
        net.flat.add_(1.0)  # training moves the live weights, not E_g
    torch.testing.assert_close(frozen(net, prepared, visit.x), plain)
    objective.loss(net, net.params, net.buffers, Batch(visit.x, visit.y, rows=torch.arange(EXAMPLES)), prepared)
    assert all(torch.equal(prepared["buffers"][n], statistics[n]) for n in prepared["buffers"])
    assert not torch.equal(net.buffers["features.extractor.1.running_mean"], torch.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "multi", "single"])
@pytest.mark.parametrize("cache_mib", [0.0, 1.0])
def test_batched_trainer_agrees(name: str, cache_mib: float):
    settings = Train(lr=1, momentum=0.9, weight_decay=0.01, epochs=2, batch=4)
    objective, network = fused(name, cache_mib=cache_mib)
    net = ModuleNet(network, torch.device("cpu"))
    start = net.flat.clone()
    works, alone = [], []
    for client in range(3):
        visit = visit_of(net, client)
        seed_dropout(net.module, client)
        dropout = {n: net.module.get_buffer(n).clone() for n in dropout_names(net.module)}
        works.append(Work(visit, objective.prepare(visit), dropout))
        alone.append(train(net, objective, visit, works[-1].prepared, settings).flat.clone())
        with torch.no_grad():
            net.flat.copy_(start)
    for trained, expected in zip(train_batched(net, objective, works, settings), alone):
        torch.testing.assert_close(trained.flat, expected, rtol=1e-4, atol=1e-5)


def test_momentum_is_kept_only_where_asked():
    for policy, kept in (("reset", False), ("keep", True)):
        objective, network = fused("multi", momentum=policy)
        net = ModuleNet(network, torch.device("cpu"))
        visit = visit_of(net, state={"momentum": np.full(net.flat.numel(), 0.5, np.float32)})
        prepared = objective.prepare(visit)
        assert (visit.momentum is not None) == kept
        trained = train(net, objective, visit, prepared, Train(lr=1, momentum=0.9, epochs=1, batch=EXAMPLES))
        outcome = objective.finish(visit, trained, prepared)
        assert (outcome.state is not None) == kept
        if kept:
            np.testing.assert_array_equal(outcome.state["momentum"], trained.momentum.numpy())
            assert float(visit.momentum.min()) == 0.5  # the loop did not write into the kept buffer


def test_a_client_predicts_with_the_extractor_it_held_and_without_dropout():
    objective, module = fused("single", cache_mib=0.0)
    net = ModuleNet(module, torch.device("cpu"))
    visit = visit_of(net)
    prepared = objective.prepare(visit)
    params = {name: p + 0.1 for name, p in visit.params.items()}  # what came of training
    found = objective.predict(net, params, visit.buffers, visit.x, prepared)
    module.eval()
    with torch.no_grad():
        reference = module.features.get_submodule("extractor")(visit.x)
        z = torch.func.functional_call(
            module.features,
            {n.removeprefix("features."): p for n, p in params.items() if n.startswith("features")},
            (visit.x, reference),
        )
        expected = torch.nn.functional.linear(z, params["classifier.weight"], params["classifier.bias"])
    torch.testing.assert_close(found, expected)


def test_features_in_chunks_are_those_of_all_examples(monkeypatch: pytest.MonkeyPatch):
    """Ten examples in chunks of four: 4, 4 and 2. Two channels of 2x2 float32 each: 320 bytes."""
    monkeypatch.setattr("fedcross.strategies.fedfusion.CHUNK", 4)
    objective, module = fused("conv")
    net = ModuleNet(module, torch.device("cpu"))
    visit = visit_of(net)
    prepared = objective.prepare(visit)
    torch.testing.assert_close(prepared["cache"], frozen(net, prepared, visit.x))
    trained = Trained(visit.params, visit.buffers, net.flat, None, 1, 0.0)
    assert objective.finish(visit, trained, prepared).metrics == {"cache-mib": 320 / 2**20}
    del prepared["cache"]
    assert objective.finish(visit, trained, prepared).metrics == {"cache-mib": 0}


def test_the_operator_stands_behind_the_extractor_in_the_state_dict():
    """The order decides how a pool's row and a flat gradient are laid out."""
    _, module = fused("multi")
    assert list(module.state_dict()) == [
        "features.extractor.0.weight", "features.extractor.0.bias", "features.fusion.share",
        "features.fc1.weight", "features.fc1.bias", "classifier.weight", "classifier.bias",
    ]  # fmt: skip


# ---- the server ----------------------------------------------------------------------------------------------------


def upload(method: Game, slot: int, examples: int, **values: float) -> Upload:
    """A model whose entries named in `values` (dots as __) are constant and the others as they are."""
    arrays = {name: array.copy() for name, array in method.model.items()}
    for name, value in values.items():
        arrays[name.replace("__", ".")][...] = value
    return Upload(slot, slot, arrays, {}, examples, {"cache-mib": 2.0 + slot})


def begun(**values: object) -> Game:
    network = build_network(FedFusion(**values), small(), 1)
    return Game(FedFusion, {n: t.numpy().copy() for n, t in network.state_dict().items()}, **values)


@pytest.mark.parametrize(
    ("weighting", "decay", "expected"),
    # lambda was .2; uploads say 1 (1 example) and 0 (3 examples): weighted mean .25, uniform .5.
    # .9 * .2 + .1 * .25 = .205; .9 * .2 + .1 * .5 = .23; without average .25.
    [("examples", 0.9, 0.205), ("uniform", 0.9, 0.23), ("examples", 0.0, 0.25)],
)
def test_lambdas_average_by_hand(weighting: str, decay: float, expected: float):
    method = begun(operator="multi", weighting=weighting, decay=decay)
    method.model[SHARE][...] = 0.2
    name = "features__fusion__share"
    uploads = [upload(method, 0, 1, **{name: 1}), upload(method, 1, 3, **{name: 0})]
    metrics = method.aggregate(Round(1, 0, (0, 1), 0), uploads)
    assert method.model[SHARE].dtype == np.float32
    np.testing.assert_allclose(method.model[SHARE], [expected, expected], rtol=1e-6)
    assert metrics["lambda_mean"] == pytest.approx(expected)
    method.model[SHARE][...] = [0.1, 0.5]  # .2 to each side of the mean, of which `decay` is left
    metrics = method.aggregate(Round(2, 0, (0, 1), 0), uploads)
    assert metrics["lambda_spread"] == pytest.approx(0.2 * decay, abs=1e-7)
    assert metrics["cache_mib"] == 3.0


def test_evaluation_uses_the_extractor_that_clients_held():
    method = begun(operator="conv")
    initial = {n: a.copy() for n, a in method.model.items() if n.startswith("features.extractor.")}
    assert np.array_equal(method.global_model()[REFERENCE + "0.weight"], initial["features.extractor.0.weight"])
    bias = "features.extractor.0.bias"
    method.aggregate(Round(1, 0, (0,), 0), [upload(method, 0, 1, features__extractor__0__bias=7)])
    method.aggregate(Round(2, 0, (0,), 0), [upload(method, 0, 1, features__extractor__0__bias=9)])
    method.aggregate(Round(3, 0, (0,), 0), [])  # everyone was lost: nothing moves
    arrays = method.global_model()
    assert arrays[bias].tolist() == [9, 9]
    assert arrays[REFERENCE + "0.bias"].tolist() == [7, 7]
    network = method.method.network(build_network(method.method, small(), 1), deployed=True).eval()
    network.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    held = network.features.extractor
    with torch.no_grad():
        held[0].bias.fill_(7)
        reference = held(x)
        held[0].bias.fill_(9)
        torch.testing.assert_close(network(x), network.classifier(network.features(x, reference)))
        assert not torch.allclose(network(x), network.classifier(network.features(x, held(x))))


def test_current_inference_uses_one_extractor():
    method = begun(operator="conv", inference="current")
    network = build_network(method.method, small(), 1).eval()
    assert method.method.network(network, deployed=True) is network
    assert set(method.global_model()) == set(network.state_dict())
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(network(x), network.classifier(network.features(x, network.features.extractor(x))))


# ---- the whole round -----------------------------------------------------------------------------------------------

OWN = ("model=fedfusion_mnist", "task.limit=48", "task.limit_test=40", "partition.clients=3", "clients_per_round=2",
       "train.momentum=0.9")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra"), [("conv", 8256), ("multi", 64), ("single", 1)])
def test_wire_is_the_model_and_the_operator(tmp_path: Path, name: str, extra: int):
    plain = run(tmp_path / "a", *OWN, "method=fedavg", "rounds=1").driver
    weights = sum(a.size for a in plain.global_model().values())
    assert plain.report.bytes_down == plain.report.bytes_up == 2 * 4 * weights
    report = run(tmp_path / "b", *OWN, "method=fedfusion", f"method.operator={name}", "rounds=1").driver.report
    assert report.bytes_down == report.bytes_up == 2 * 4 * (weights + extra)
    assert (report.dropped, dict(report.rejected)) == (0, {})


@pytest.mark.slow
def test_kept_momentum_changes_the_second_visit_only(tmp_path: Path):
    def weights(policy: str, rounds: int) -> np.ndarray:
        own = ("method=fedfusion", "partition.clients=2", f"method.momentum={policy}", f"rounds={rounds}")
        return run(tmp_path / f"{policy}{rounds}", *OWN, *own).driver.state.model["classifier.weight"]

    assert np.array_equal(weights("reset", 1), weights("keep", 1))
    assert not np.array_equal(weights("reset", 2), weights("keep", 2))
