"""Networks of one's own by import path: what is accepted, and the message for everything that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.models import create
from fedcross.tasks.models.dropout import Dropout
from tests.support.federation import run

NET = '''
import torch
from torch import nn
from torch.nn import functional


class Plain(nn.Module):
    """No halves: scores only."""

    def __init__(self, classes, hidden=8, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)
        )

    def forward(self, x):
        return self.layers(x)


class Halves(nn.Module):
    def __init__(self, classes, hidden=8, wrong=""):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, classes)
        self.wrong = wrong
        if wrong == "embedding":
            self.embedding = 5

    def forward(self, x):
        return self.classifier(self.features(x)) * (2 if self.wrong == "halves" else 1)


class Random(Plain):
    def forward(self, x):
        return functional.dropout(self.layers(x), 0.5, self.training)


class Tuple(Plain):
    def forward(self, x):
        return self.layers(x), None


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


class NotAModule:
    pass


def made(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))


def fails():
    raise OSError("no such weights")


def number():
    return 3

'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A package of the user's own, and its folder in FEDCROSS_PATH."""
    root = tmp_path_factory.mktemp("user")
    (root / "ownnets").mkdir()
    (root / "ownnets" / "net.py").write_text(NET)
    (root / "ownnets" / "broken.py").write_text("import missing_library_xyz\n")
    return root


@pytest.fixture(autouse=True)
def _path(folder, monkeypatch):
    monkeypatch.setenv("FEDCROSS_PATH", str(folder))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))


def digits() -> Task:
    examples = Examples(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    return Task("digits", examples, examples, 10, (1, 8, 8), lambda x: torch.from_numpy(np.asarray(x, np.float32)))


def text() -> Task:
    examples = Examples(np.zeros((1, 6), np.int32), np.zeros(1, np.int64))
    return Task("words", examples, examples, 2, (6,), lambda x: torch.from_numpy(np.asarray(x)).long(), vocabulary=12)


def built(name, task=None, **settings):
    return create("own", {"path": f"ownnets.net:{name}", **settings}, task or digits(), 1)


def test_the_task_gives_what_the_class_asks_for() -> None:
    plain = built("Plain", hidden=3, dropout=0.5)
    assert plain(torch.zeros(4, 1, 8, 8)).shape == (4, 10)
    assert isinstance(plain.layers[3], Dropout)
    assert plain.layers[3].p == 0.5
    assert plain.training
    assert built("Halves", hidden=7).embedding == 7
    assert built("made")(torch.zeros(4, 1, 8, 8)).shape == (4, 10)


#: Imports transformers.
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        ("ownnets.nett:Plain", {}, "model.path='ownnets.nett:Plain': there is no module ownnets.nett."),
        ("ownnets.net:Plan", {}, "has no Plan. Did you mean 'Plain'?"),
        ("ownnets.broken:Net", {}, "ownnets.broken imports missing_library_xyz, which is not installed."),
        ("ownnets.net:NotAModule", {}, "NotAModule is no torch.nn.Module."),
        ("ownnets.net:Plain", {"hiden": 3}, "ownnets.net:Plain has no such argument. Did you mean 'hidden'?"),
        ("ownnets.net:Needs", {}, "model.width: ownnets.net:Needs needs this argument. Set model.width=VALUE."),
        ("ownnets.net:fails", {}, "fails() raised OSError: no such weights."),
        ("ownnets.net:number", {}, "returned a int, not a torch.nn.Module."),
        ("ownnets.net:Plain", {"classes": 3}, "(2, 3)"),
        ("ownnets.net:Tuple", {}, "tuple"),
        ("ownnets.net:Random", {}, "global generator"),
        ("ownnets.net:Halves", {"wrong": "halves"}, "classifier(features(x)) is not forward(x)"),
        ("ownnets.net:Halves", {"wrong": "embedding"}, "embedding=5, but features(x) has 8 columns."),
        pytest.param("ownnets.net:Plain", {"lora": {"r": 2, "target_modules": ["nix"]}}, "peft says", marks=SLOW),
        pytest.param("transformers:BertForSequenceClassification", {}, "needs text (token ids)", marks=SLOW),
        pytest.param("transformers:BertForSequenceClassification", {"hiden_size": 3}, "'hidden_size'?", marks=SLOW),
    ],
)  # fmt: skip
def test_every_fault_is_told_with_its_cure(path, settings, words) -> None:
    with pytest.raises(ConfigError) as caught:
        create("own", {"path": path, **settings}, digits(), 1)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("method", ["fedcross method.k=4", "moon"])
def test_a_run(tmp_path: Path, method: str) -> None:
    ready = run(tmp_path, "model=ownnets.net:Halves", "model.hidden=6", *f"method={method}".split(), "rounds=1")
    assert ready.evaluator.network().classifier.out_features == 10


@pytest.mark.slow
def test_a_bert_masks_padding_and_is_split() -> None:
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    path = "transformers:BertForSequenceClassification"
    bert = create("own", {"path": path, "max_position_embeddings": 6, **settings}, text(), 1).eval()
    assert isinstance(bert.classifier, nn.Linear)
    assert bert.embedding == 8
    assert bert.features.additive  # so that clients can be trained together
    x = torch.tensor([[0, 0, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        scores = bert(x)
        bert.features.additive = False
        torch.testing.assert_close(bert(x), scores)
        bert.features.network.get_input_embeddings().weight[0] += 1  # what stands at padding does not count...
        bert.features.additive = True
        assert not torch.equal(bert(x)[1], scores[1])  # ... except where a text is empty
    assert torch.isfinite(scores).all()
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}
    causal = create("own", {"path": "transformers:GPT2ForSequenceClassification", **sizes}, text(), 1)
    assert not causal.features.additive  # its own mask hides what comes later
    assert causal(x).shape == (2, 2)
