"""Every method: a run that is resumed after each of its rounds ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcross.conf.compose import CONF
from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.session import Session
from fedcross.strategies.round.federation import State
from tests.support.federation import run, same

#: Trains two federations for each method.
pytestmark = pytest.mark.slow

FLOAT16 = ("compression.up=float16", "compression.down=float16")
METHODS = sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
ROUNDS = 4
#: Trained like this, a few rounds change much.
SETTINGS = ("partition=dirichlet", "partition.min_size=5", "train.batch=8", "train.lr=0.1", "checkpoint.every=1")
#: Large enough that the order of a sum shows: in a tiny model it hides.
WIDE = ("model=own", "model.path=tests.server.test_resume_of_every_method:Scaled")


class Scaled(nn.Module):
    """A network with a scalar that is trained, as CLIP's temperature, and one that is not."""

    def __init__(self, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        layers = nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(128, classes)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("version", torch.tensor(2**53 + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.classifier(self.features(x)) * self.temperature
        return logits


def settings_of(method: str) -> list[str]:
    """Return what the method needs besides the small federation's settings."""
    model = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else list(WIDE)
    devices = ["devices=three_sizes"] if "sizes" in method or method in ("heterofl", "adaptivefl") else []
    whole = ["method.whole=1"] if method == "fedfan_three_sizes" else []
    return [*SETTINGS, f"method={method}", *model, *devices, *whole]


@pytest.mark.parametrize("method", METHODS)
def test_a_resume_after_every_round_changes_no_bit(tmp_path: Path, method: str) -> None:
    own = [*settings_of(method), f"rounds={ROUNDS}"]
    whole = run(tmp_path / "whole", *own)
    cut = run(tmp_path / "cut", *own, "stop_at=1")
    for number in range(2, ROUNDS + 1):
        cut = run(tmp_path / "cut", *own, f"stop_at={number}", f"resume={tmp_path / 'cut'}")
    ours, theirs = whole.method.state(), cut.method.state()
    assert set(ours.arrays) == set(theirs.arrays)
    for name, array in ours.arrays.items():
        assert theirs.arrays[name].shape == array.shape, name  # the next line takes a scalar for a list of one
        np.testing.assert_array_equal(theirs.arrays[name], array, err_msg=name)
    model = whole.method.evaluation_arrays()
    assert all(array == 2**53 + 1 for name, array in model.items() if name == "version")
    assert ours.values == theirs.values


def cut_in_two(folder: Path, change: Callable[[State], State], *own: str) -> Session:
    """Return a run that was resumed after its second round from a checkpoint with the state that `change` returns."""
    run(folder, *own, "stop_at=2")
    checkpoints = Checkpoints(folder)
    number, state, identity = checkpoints.latest()
    checkpoints.save(number, change(state), identity)
    return run(folder, *own, f"resume={folder}")


def as_before(state: State) -> State:
    """Return `state` as earlier versions stored it: scalars as lists of one, residuals with a prefix without a dot."""
    arrays = {name.replace(".residual.", "_residual."): np.atleast_1d(array) for name, array in state.arrays.items()}
    assert any(array.ndim == 0 for array in state.arrays.values())
    return State(arrays, state.values)


@pytest.mark.parametrize(
    ("method", "more"),
    [("fedavg", FLOAT16), ("scaffold", FLOAT16), ("fedbuff", ()), ("heterofl", FLOAT16), ("flwr", ())],
)
def test_a_checkpoint_of_an_earlier_version_is_continued_to_the_bit(tmp_path, method, more):
    """It has scalars as lists of one, and this version's digest of it is the same."""
    own = [*settings_of(method), *more, f"rounds={ROUNDS}"]
    whole = run(tmp_path / "whole", *own)
    cut = cut_in_two(tmp_path / "cut", as_before, *own)
    assert same(cut.method.global_model(), whole.method.global_model())
    assert cut.method.global_model()["temperature"].shape == ()


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("fedavg", {"model.classifier.bias": None}, "has no 'model.classifier.bias'"),
        ("fedavg", {"model.classifier.bias": np.zeros(3, np.float32)}, r"'classifier\.bias' with shape \(3,\) float32"),
        ("fedavg", {"model.classifier.bias": np.zeros(10)}, r"float64, this run's with shape \(10,\) float32"),
        ("fedcross", {"pool.rows": None}, "has no 'pool.rows'"),
        ("flwr", {}, "the strategy's attribute x cannot be restored"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, method, change, words):
    def changed(state: State) -> State:
        arrays = {name: array for name, array in {**state.arrays, **change}.items() if array is not None}
        kinds = {} if change else {"attributes": {"x": {"$kind": "nonsense", "of": 1}}}
        return State(arrays, {**state.values, **kinds})

    with pytest.raises(StorageError, match=rf"round-000002\.safetensors: .*{words}") as caught:
        cut_in_two(tmp_path, changed, *settings_of(method), "rounds=3")
    assert "ontinue with" in str(caught.value) or method == "flwr"


def test_a_run_whose_network_has_changed_is_told_so(tmp_path):
    def changed(state: State) -> State:
        model = {**state.values["_model"], "classifier.bias": [[11], "float32"]}
        return State(state.arrays, {**state.values, "_model": model})

    with pytest.raises(
        StorageError, match=r"'classifier\.bias' with shape \(11,\) float32, this run's with shape \(10,\)"
    ):
        cut_in_two(tmp_path, changed, *settings_of("fedcross"), "rounds=3")
