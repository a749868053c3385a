"""Models: weight counts worked by hand, the split into features and classifier, and seeding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from tasks.base import Examples, Task
from tasks.errors import ConfigError
from tasks.models import create
from tasks.models._split import weights
from tasks.settings import find

EMPTY = Examples(np.zeros((0, 1)), np.zeros(0, np.int64))
CONF = Path(__file__).parents[2] / "conf" / "model"


def image_task(channels: int, size: int, classes: int) -> Task:
    return Task("images", EMPTY, EMPTY, classes, (channels, size, size), torch.from_numpy)


def text_task(vocabulary: int, length: int, classes: int) -> Task:
    return Task("text", EMPTY, EMPTY, classes, (length,), torch.from_numpy, vocabulary=vocabulary)


DIGITS = image_task(1, 8, 10)
MNIST = image_task(1, 28, 10)
CIFAR10 = image_task(3, 32, 10)
CIFAR20 = image_task(3, 32, 20)
CIFAR100 = image_task(3, 32, 100)
FEMNIST = image_task(1, 28, 62)
TINY = image_task(3, 64, 200)
SHAKESPEARE = text_task(80, 80, 80)
SENT140 = text_task(500, 25, 2)

# Expected counts: the derivation stands in each model's docstring.
COUNTS: list[tuple[str, dict[str, Any], Task, int]] = [
    ("mlp", {}, DIGITS, 4_810),
    ("mlp", {"hidden": [32, 16]}, DIGITS, 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10),
    ("lenet5", {}, CIFAR10, 62_006),
    ("lenet5", {}, CIFAR20, 62_006 + 10 * 85),
    ("lenet5", {}, MNIST, 61_706),
]


def batch(task: Task, size: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(task.classes, (size,), generator=generator)
    if task.vocabulary:
        return torch.randint(task.vocabulary, (size, *task.shape), generator=generator), y
    return torch.randn(size, *task.shape, generator=generator), y


@pytest.mark.parametrize(("name", "settings", "task", "expected"), COUNTS)
def test_number_of_weights(name: str, settings: dict[str, Any], task: Task, expected: int) -> None:
    assert weights(create(name, settings, task, seed=0)) == expected


@pytest.mark.parametrize(("name", "settings", "task"), [row[:3] for row in COUNTS])
def test_one_training_step(name: str, settings: dict[str, Any], task: Task) -> None:
    """Logits and loss are finite, gradients reach both halves, and the halves compose to the whole."""
    model = create(name, settings, task, seed=0)
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
        if model.extractor_channels:
            fused = model.features.extractor(x)  # type: ignore[union-attr,operator]
            assert fused.dim() == 4
            assert fused.shape[1] == model.extractor_channels
            rest = list(model.features.children())[1:]  # the extractor comes first, the rest follows
            assert torch.equal(nn.Sequential(*rest)(fused), embedding)
        if not task.vocabulary:
            last = model(x.to(memory_format=torch.channels_last))
            torch.testing.assert_close(last, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_configuration_file(file: Path) -> None:
    text = file.read_text()
    assert text.startswith(f"# fedcross model={file.stem}")
    values = yaml.safe_load(text)
    assert values.pop("name") == file.stem
    params = find("tasks.models", file.stem, "model").Params
    assert params(**values) == params()
    assert set(values) == set(params.model_fields)


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
        ("lenet5", {}, SHAKESPEARE, "needs images"),
        ("mlp", {"hidden": []}, DIGITS, "model.hidden"),
        ("mlp", {"hiden": [3]}, DIGITS, "Did you mean 'hidden'"),
    ],
)
def test_wrong_choice_is_explained(name: str, settings: dict[str, Any], task: Task, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, settings, task, seed=0)
