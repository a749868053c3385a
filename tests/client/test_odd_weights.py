"""Networks with tied weights, frozen weights, and weights that are no float32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import batches, train
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.tasks.models._split import Split
from fedcross.tasks.models.weights import arrays_of, tied, trainable
from tests.support import visits as v
from tests.support.federation import run, session

MODEL = '''
"""Two layers and a classifier; its weight may be the second layer's, the first may be frozen."""

import torch
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.models._split import Split


class Params(Settings):
    kind: str = "tied"


def build(params, task):
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    model = Split(features, nn.Linear(10, 10))
    if params.kind == "tied":
        model.classifier.weight = features[3].weight
    elif params.kind == "frozen":
        features[1].requires_grad_(False)
    elif params.kind == "all_frozen":
        model.requires_grad_(False)
    elif params.kind == "mixed":
        model.classifier.double()
    else:
        model.to(getattr(torch, params.kind))
    return model
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """The reader's own model: one folder for all tests here, since compositions are remembered by it."""
    root = tmp_path_factory.mktemp("mine")
    for name, text in {"tasks/models/odd.py": MODEL, "conf/model/odd.yaml": "name: odd\nkind: tied\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    from fedcross.tasks import models

    before = list(models.__path__)
    yield root
    models.__path__[:] = before
    sys.modules.pop("fedcross.tasks.models.odd", None)


@pytest.fixture
def _plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_PATH", str(folder))


def tied_module(dtype: torch.dtype = torch.float64) -> Split:
    """Two layers with one weight: the last of the features and the classifier."""
    torch.manual_seed(3)
    features = nn.Sequential(nn.Flatten(), nn.Linear(72, 3), nn.Tanh(), nn.Linear(3, 3))
    model = Split(features, nn.Linear(3, 3))
    model.classifier.weight = features[3].weight
    return model.to(dtype)


def frozen_module() -> Split:
    """A little network whose first layer is frozen."""
    torch.manual_seed(3)
    features = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh())
    features[1].requires_grad_(False)
    return Split(features, nn.Linear(5, 3)).double()


class InHalves(Objective):
    """Asks for features and classifier apart, in evaluation behaviour too."""

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        z = net.features(params, buffers, batch.x)
        scores = net.classify(params, buffers, z) + 0.1 * net.classify(params, buffers, z.detach(), train=False)
        return batch.mean(nn.functional.cross_entropy(scores, batch.y, reduction="none"))


def test_a_tied_weight_is_one_entry_under_its_first_name() -> None:
    module = tied_module()
    assert tied(module) == {"classifier.weight": "features.3.weight"}
    net = ModuleNet(module, v.CPU)
    assert len(net.flat) == 72 * 3 + 3 + 9 + 3 + 3
    assert net.names == [
        "features.1.weight",
        "features.1.bias",
        "features.3.weight",
        "features.3.bias",
        "classifier.bias",
    ]
    assert list(net.read()) == net.names == list(arrays_of(module))
    assert net.module.classifier.weight.data_ptr() == net.params["features.3.weight"].data_ptr()


def test_a_tied_weight_is_trained_as_torch_does() -> None:
    net = ModuleNet(tied_module(), v.CPU)
    one = v.visit(net, 0, 10)
    v.enter(net, one)
    twin = tied_module()
    twin.load_state_dict(net.module.state_dict())
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for inputs, labels, _ in batches(one, 2, 4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(inputs), labels).backward()
        optimiser.step()
    train(net, Objective(Settings()), one, {}, v.settings())
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(net.module.state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [Objective(Settings()), InHalves(Settings())], ids=["whole", "halves"])
@pytest.mark.parametrize("module", [tied_module, frozen_module])
def test_the_batched_trainer_agrees(module, objective: Objective) -> None:
    net = ModuleNet(module(), v.CPU)
    clients = [v.visit(net, i, n) for i, n in enumerate((9, 5, 7))]
    works = [v.work(net, objective, one) for one in clients]
    found = train_batched(net, objective, works, v.settings())
    for one, together in zip(clients, found, strict=True):
        v.enter(net, one)
        alone = train(net, objective, one, {}, v.settings())
        torch.testing.assert_close(together.flat, alone.flat, rtol=0, atol=1e-12)
        for name, buffer in one.buffers.items():
            assert torch.equal(together.buffers[name], buffer)
            assert torch.equal(alone.buffers[name], buffer)


def test_frozen_weights_are_neither_trained_nor_decayed() -> None:
    net = ModuleNet(frozen_module(), v.CPU)
    assert list(net.params) == ["classifier.weight", "classifier.bias"] == sorted(trainable(net.module), reverse=True)
    assert net.frozen == {"features.1.weight", "features.1.bias"}
    assert len(net.flat) == 5 * 3 + 3
    one = v.visit(net, 0, 10)
    v.enter(net, one)
    before = {name: array.copy() for name, array in net.read().items()}
    train(net, Objective(Settings()), one, {}, v.settings(weight_decay=0.5))
    for name, array in net.read().items():
        assert (array == before[name]).all() == (name in net.frozen), name
    assert net.module.features[1].weight.grad is None


@pytest.mark.slow
@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize("method", ["scaffold", "flwr", "fedcross method.k=4 compression.up=int8"])
def test_a_run_with_tied_weights(tmp_path: Path, method: str) -> None:
    """The wire carries the weight once; what leaves the run has it under both names."""
    folder = tmp_path / "run"
    ready = run(folder, "model=odd", "rounds=2", f"method={method.split()[0]}", *method.split()[1:])
    assert "classifier.weight" not in ready.driver.start.spec
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(saved["classifier.weight"], saved["features.3.weight"])
    plain = Split(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10)), nn.Linear(10, 10))
    plain.load_state_dict(saved)  # both names are there, no more and no less
    resumed = run(
        folder, "model=odd", "rounds=3", f"method={method.split()[0]}", *method.split()[1:], f"resume={folder}"
    )
    assert resumed.tied == {"classifier.weight": "features.3.weight"}


@pytest.mark.slow
@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize("method", ["scaffold", "fedcross_propellers", "flwr", "fedct"])
def test_a_run_leaves_frozen_weights_as_they_were(tmp_path: Path, method: str) -> None:
    """The server averages them as it does buffers: of equal values, so rounding of float32 is all that can happen."""
    ready = session(
        tmp_path, "model=odd", "model.kind=frozen", f"method={method}", "train.weight_decay=0.1", "train.lr=0.1"
    )
    before = {name: array.copy() for name, array in ready.driver.global_model().items()}
    ready.execute()
    after = ready.driver.global_model()
    for name in before:
        if name.startswith("features.1."):
            np.testing.assert_allclose(after[name], before[name], rtol=1e-6, atol=0)
        else:
            assert not np.array_equal(after[name], before[name])
    assert set(ready.driver.start.parameters) == {
        "features.3.weight", "features.3.bias", "classifier.weight", "classifier.bias"
    }  # fmt: skip


@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("bfloat16", r"features\.1\.weight is bfloat16, .*train\.precision=bfloat16"),
        ("float16", r"features\.1\.weight is float16, weights must be float32 or float64"),
        ("mixed", r"features\S+ is float32, classifier\S+ is float64"),
        ("all_frozen", "nothing to train"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_at_the_start(tmp_path: Path, kind: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        session(tmp_path, "model=odd", f"model.kind={kind}", "method=fedavg")
    if hasattr(torch, kind):
        with pytest.raises(ConfigError, match=kind):
            ModuleNet(tied_module(getattr(torch, kind)), v.CPU)
