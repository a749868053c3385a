"""Models: weight counts, the split into features and classifier, seeding, and many clients under vmap."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedcross.conf.compose import CONF
from fedcross.core.errors import ConfigError
from fedcross.core.settings import find
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.models import create
from fedcross.tasks.models._split import Split
from tests.support.bench import weights
from tests.support.config_files import read_choice

EMPTY = Examples(np.zeros((0, 1)), np.zeros(0, np.int64))


def image_task(channels: int, size: int, classes: int) -> Task:
    return Task("images", EMPTY, EMPTY, classes, (channels, size, size), torch.from_numpy)


def text_task(vocabulary: int, length: int, classes: int) -> Task:
    return Task("text", EMPTY, EMPTY, classes, (length,), torch.from_numpy, vocabulary=vocabulary)


DIGITS = image_task(1, 8, 10)
MNIST = image_task(1, 28, 10)
CIFAR10 = image_task(3, 32, 10)
FEMNIST = image_task(1, 28, 62)
TINY = image_task(3, 64, 200)
VIREO = image_task(3, 64, 172)  # smaller than the real 224x224, for speed; the weights do not depend on it
SHAKESPEARE = text_task(80, 80, 80)
SENT140 = text_task(500, 25, 2)

# Expected counts: the derivation stands in each model's docstring.
COUNTS: list[tuple[str, dict[str, Any], Task, int]] = [
    ("mlp", {}, DIGITS, 4_810),
    ("lenet5", {}, CIFAR10, 62_006),
    ("lenet5", {}, MNIST, 61_706),
    ("cnn_femnist", {}, FEMNIST, 160_510),
    ("cnn_w", {}, CIFAR10, 878_538),
    ("cnn_fedavg", {}, CIFAR10, 2_156_490),
    ("resnet20_lab", {}, CIFAR10, 219_482),
    ("resnet20_lab", {"final_norm": True}, CIFAR10, 219_482),
    ("resnet20", {}, CIFAR10, 269_722),
    ("vgg16_bn", {}, CIFAR10, 33_646_666),
    ("vgg_femnist", {}, FEMNIST, 8_024_958),
    ("resnet18", {}, CIFAR10, 11_173_962),
    ("resnet18", {}, TINY, 11_173_962 + 190 * 513),
    ("resnet18", {"stem": "authors"}, CIFAR10, 11_173_962 + 2 * (512 * 512 + 512)),
    ("resnet18", {"stem": "authors_7x7"}, VIREO, 11_181_642 + 162 * 513 + 2 * (512 * 512 + 512)),
    ("resnet18", {"stem": "imagenet"}, VIREO, 11_181_642 + 162 * 513),
    ("fedfusion_cifar", {}, CIFAR10, 1_756_426),
    ("fedfusion_mnist", {}, MNIST, 1_630_602),
    ("fedfusion_mnist", {"variant": "paper"}, MNIST, 1_663_370),
    ("lstm", {}, SHAKESPEARE, 819_920),
    ("lstm_sent140", {}, SENT140, 100 * 500 + 174_786),
    # torchvision's documented 2,542,856 for 1,000 classes, whose last layer has 1,025 weights per class
    ("torchvision", {}, CIFAR10, 2_542_856 - 990 * 1025),
    ("torchvision", {"architecture": "shufflenet_v2_x0_5"}, MNIST, 1_366_792 - 990 * 1025),
]


def batch(task: Task, size: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(task.classes, (size,), generator=generator)
    if task.vocabulary:
        return torch.randint(task.vocabulary, (size, *task.shape), generator=generator), y
    return torch.randn(size, *task.shape, generator=generator), y


@pytest.fixture(scope="module", params=COUNTS, ids=lambda row: f"{row[0]}-{row[3]}")
def built(request: pytest.FixtureRequest) -> tuple[Split, Task, int]:
    """A model of the table, its task and its number of weights: drawn once for both of its tests."""
    name, settings, task, expected = request.param
    return create(name, settings, task, seed=0), task, expected


def test_number_of_weights(built: tuple[Split, Task, int]) -> None:
    model, _, expected = built
    assert weights(model) == expected


@pytest.mark.slow
def test_one_training_step(built: tuple[Split, Task, int]) -> None:
    """Logits and loss are finite, gradients reach both halves, and the halves compose to the whole."""
    model, task, _ = built
    assert [child for child, _ in model.named_children()] == ["features", "classifier"]
    assert isinstance(model.classifier, nn.Linear)
    x, y = batch(task)
    logits = model(x)
    assert logits.shape == (2, task.classes)
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    assert torch.isfinite(loss)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() for g in grads)
    assert model.classifier.weight.grad is not None
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.features.parameters())
    model.eval()
    with torch.no_grad():
        embedding = model.features(x)
        assert embedding.shape == (2, model.embedding)
        assert torch.equal(model.classifier(embedding), model(x))
        if model.extractor_channels:  # the extractor comes first, the rest follows
            fused = model.features.extractor(x)  # type: ignore[union-attr,operator]
            assert (fused.dim(), fused.shape[1]) == (4, model.extractor_channels)
            assert torch.equal(nn.Sequential(*list(model.features.children())[1:])(fused), embedding)


@pytest.mark.parametrize("name", [file.stem for file in sorted((CONF / "model").glob("*.yaml")) if file.stem != "own"])
def test_configuration_file(name: str) -> None:
    values = read_choice("model", name)
    assert values.pop("name") == name
    module = values.pop("module", name)
    params = find("fedcross.tasks.models", module, "model").Params
    fixed = {key: value for key, value in values.items() if not str(value).startswith("${")}
    assert (params(**fixed) == params()) == (module == name)  # another name is another variant
    assert set(values) == set(params.model_fields)


def test_fixed_word_vectors_are_no_weights(tmp_path: Path) -> None:
    np.save(tmp_path / "glove.npy", np.ones((500, 50)))
    model = create("lstm_sent140", {"vectors": str(tmp_path / "glove.npy")}, SENT140, seed=0)
    # input 50: 4*100*(50+100)+800 = 60,800 weights in the first layer, 80,800 in the second, and no embedding
    assert weights(model) == 60_800 + 80_800 + 12_928 + 258
    assert not any("vectors" in name for name in model.state_dict())
    assert model(batch(SENT140)[0]).shape == (2, 2)
    with pytest.raises(ConfigError, match="vocabulary has 80 words"):
        create("lstm_sent140", {"vectors": str(tmp_path / "glove.npy")}, SHAKESPEARE, seed=0)


def test_lab_resnet_starts_as_its_code_and_leaves_its_last_norm_unused() -> None:
    model = create("resnet20_lab", {}, CIFAR10, seed=0)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 3 * 6 + 1
    assert all(bool((m.weight == 0.5).all()) for m in norms)
    x, y = batch(CIFAR10)
    nn.functional.cross_entropy(model(x), y).backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    assert unused == {"features.norm.weight", "features.norm.bias"}


def test_seed_decides_the_weights_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    a, b, c = (create("lenet5", {"name": "lenet5"}, CIFAR10, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for first, second in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(a.classifier.weight, c.classifier.weight)


@pytest.mark.parametrize(
    ("name", "settings", "task", "message"),
    [
        ("lenet", {}, CIFAR10, "Did you mean 'lenet5'"),
        ("dropout", {}, CIFAR10, "is no model"),
        ("lenet5", {}, DIGITS, "too small"),
        ("lstm", {}, CIFAR10, "needs text"),
        ("vgg16_bn", {}, FEMNIST, "too small"),
        ("torchvision", {"architecture": "resnet81"}, CIFAR10, "Did you mean 'resnet"),
        ("torchvision", {"architecture": "alexnet"}, CIFAR10, "too small"),
        ("torchvision", {"architecture": "resnet18", "options": {"depth": 3}}, CIFAR10, "model.options"),
        ("torchvision", {}, image_task(4, 32, 10), "1 or 3 channels"),
        ("lstm_sent140", {"vectors": "/nowhere/glove.npy"}, SENT140, "model.vectors"),
        ("mlp", {"hidden": []}, DIGITS, "model.hidden"),
        ("mlp", {"hiden": [3]}, DIGITS, "Did you mean 'hidden'"),
    ],
)
def test_wrong_choice_is_explained(name: str, settings: dict[str, Any], task: Task, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, settings, task, seed=0)


def step(base: nn.Module, params: Any, buffers: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    def loss(params: Any, buffers: Any) -> Tensor:
        return nn.functional.cross_entropy(functional_call(base, (params, buffers), (x,)), y)

    grads: dict[str, Tensor] = grad(loss)(params, buffers)
    return grads


SHORT = text_task(80, 6, 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "task"),
    [
        ("resnet20_lab", {}, CIFAR10),
        ("lenet5", {}, CIFAR10),
        ("cnn_femnist", {}, FEMNIST),
        ("fedfusion_mnist", {}, MNIST),
        ("lstm", {"dropout": 0.5}, SHORT),
    ],
)
def test_vmap_equals_one_by_one(name: str, settings: dict[str, Any], task: Task) -> None:
    """Two steps of two clients: gradients, running statistics and dropout states agree.

    Plain ``nn.BatchNorm2d`` updates its running statistics in place, and under vmap that reaches the stacked buffers;
    no class of our own is needed.
    """
    models = [create(name, settings, task, seed=s) for s in (1, 2)]
    x, y = batch(task, size=8)
    x, y = x.reshape(2, 2, 2, *task.shape), y.reshape(2, 2, 2)  # step, client, example
    params, buffers = stack_module_state(models)
    params = {k: v.detach() for k, v in params.items()}
    base = copy.deepcopy(models[0])
    alone = [(dict(m.named_parameters()), dict(m.named_buffers())) for m in models]
    for inputs, labels in zip(x, y, strict=True):
        together = vmap(lambda p, b, xs, ys: step(base, p, b, xs, ys))(params, buffers, inputs, labels)
        for client, (own, state) in enumerate(alone):
            model = models[client]
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[client]), labels[client]).backward()
            for key, parameter in own.items():
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(together[key][client], expected, rtol=1e-3, atol=1e-4)
            for key, value in state.items():
                torch.testing.assert_close(buffers[key][client], value, rtol=1e-4, atol=1e-5)
