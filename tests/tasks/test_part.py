"""``train.only``: the base leaves the state_dict, stays as it was, and is the same on every device."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedcross.client.batched.stack import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.core.errors import ConfigError, DataError
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Objective
from fedcross.tasks.models._huggingface import with_lora
from fedcross.tasks.models._split import Split
from fedcross.tasks.models.part import check_file, digest, narrow
from fedcross.tasks.models.weights import trainable
from tests.support import visits as v


class Counts(nn.Module):
    """Counts its calls in a buffer, as a layer may."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return x + self.calls


def network(seed: int = 3) -> Split:
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.BatchNorm1d(6), nn.Tanh(), Counts())
    return Split(features, nn.Linear(6, 3)).double()


def test_only_what_matches_is_in_the_state_dict() -> None:
    net = network()
    whole = copy.deepcopy(net)
    found = narrow(net, ["classifier.*"])
    assert list(net.state_dict()) == ["classifier.weight", "classifier.bias"]
    assert trainable(net) == {"classifier.weight", "classifier.bias"}
    x = torch.randn(4, 1, 72, dtype=torch.float64)
    assert torch.equal(net.eval()(x), whole.eval()(x))
    base = {name: t for name, t in whole.state_dict().items() if not name.startswith("classifier")}
    assert found == digest(base)
    assert found != digest({**base, "features.1.bias": base["features.1.bias"] + 1e-12})


@pytest.mark.parametrize("patterns", [["classifier.*"], ["features.2.*", "classifier.*"], ["features.2.weight"]])
def test_training_leaves_the_base_and_both_trainers_agree(patterns) -> None:
    module = network()
    if patterns != ["features.2.*", "classifier.*"]:
        module.features[2].running_mean += 0.5
    narrow(module, patterns)
    net = ModuleNet(module, v.CPU)
    before = {n: b.clone() for n, b in module.named_buffers() if n not in net.buffers}
    objective = Objective(Settings())
    clients = [v.visit(net, i, n) for i, n in enumerate((8, 4))]
    works = [Work(one, {}, dict(net.base_buffers)) for one in clients]
    for one, together in zip(clients, train_batched(net, objective, works, v.settings(batch=4)), strict=True):
        v.enter(net, one)
        alone = train(net, objective, one, {}, v.settings(batch=4))
        torch.testing.assert_close(together.flat, alone.flat, rtol=0, atol=1e-12)
        assert not torch.equal(alone.flat, torch.cat([p.reshape(-1) for p in one.params.values()]))
    statistics = {name for name in net.names if "running" in name or "batches" in name}
    assert bool(statistics) == ("features.2.*" in patterns)
    net.load(net.read())  # the next visit starts from the base
    for name, value in before.items():
        assert torch.equal(dict(module.named_buffers())[name], value), name


@pytest.mark.slow
def test_the_file_of_the_base(tmp_path) -> None:
    file = tmp_path / "base.safetensors"
    save_file(network(seed=9).state_dict(), file)
    net = with_lora(network(), {"r": 2, "target_modules": ["1"]})  # the file knows nothing of adapters
    narrow(net, ["*lora_*"], file)
    assert torch.equal(net.features[1].base_layer.weight, network(seed=9).features[1].weight)
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    check_file(file, right)
    with pytest.raises(DataError, match=f"its SHA-256 is {right}, train.base_sha256 says None"):
        check_file(file, None)
    with pytest.raises(DataError, match="cannot be read"):
        check_file(tmp_path / "none", right)


@pytest.mark.parametrize("kind", ["missing", "shape", "damaged"])
def test_a_file_that_does_not_fit(tmp_path, kind) -> None:
    file = tmp_path / "base.safetensors"
    entries = network().state_dict()
    if kind == "missing":
        del entries["features.1.bias"]
    elif kind == "shape":
        entries["features.1.bias"] = torch.zeros(2)
    save_file(entries, file)
    if kind == "damaged":
        file.write_bytes(file.read_bytes()[:50])
    words = {"missing": "features.1.bias .* no such entry", "shape": r"\(6,\) it has shape \(2,\)"}
    with pytest.raises(DataError, match=words.get(kind, "cannot be read")):
        narrow(network(), ["classifier.*"], file)


@pytest.mark.parametrize("patterns", [["nix.*"], ["classifier.*", "nix"], ["*running*"]])
def test_patterns_that_match_nothing_to_train(patterns) -> None:
    with pytest.raises(ConfigError, match=r"train\.only"):
        narrow(network(), patterns)
