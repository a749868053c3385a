"""The app's own network and data: scikit-learn's digits, cut into equal parts."""

from functools import cache

import torch
from flwr.common import NDArrays
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST = 360


def network() -> nn.Module:
    """Return the network, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def numbers(model: nn.Module) -> NDArrays:
    """Return the model as the classic API sends it: a list of arrays, in the order of its ``state_dict``."""
    return [tensor.numpy() for tensor in model.state_dict().values()]


def load(model: nn.Module, arrays: NDArrays) -> None:
    """Put the list of arrays into the model."""
    model.load_state_dict({name: torch.tensor(array) for name, array in zip(model.state_dict(), arrays)})


@cache
def _digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]


def own_part(part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return what client `part` of `parts` trains on."""
    x, y = _digits()
    return x[TEST + part :: parts], y[TEST + part :: parts]


def test_part() -> tuple[Tensor, Tensor]:
    """Return the server's test set."""
    x, y = _digits()
    return x[:TEST], y[:TEST]
