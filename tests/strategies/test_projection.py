"""Projection heads: widths, weights, unit vectors; what FedProc's authors have otherwise."""

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.flat_model import ModuleNet
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedct import FedCT
from fedcross.strategies.fedproc import FedProc, Prototypical
from fedcross.strategies.moon import Moon, Projected, project
from fedcross.tasks.models import create
from fedcross.tasks.models._split import Split
from tests.support.bench import check_resume, open_visit, two_layers, weights
from tests.support.federation import run
from tests.tasks.test_models import CIFAR10


def split():
    return Split(nn.Linear(6, 4), nn.Linear(4, 3))


def test_the_head_of_the_authors_is_as_wide_as_its_input():
    # LeNet-5: 62,006 - 850 + 84*84 + 84 + 84*256 + 256 + 2,570 = 92,626; with 512: 84*512 + 512 + 512*256 + 256.
    lenet = create("lenet5", {}, CIFAR10, 1)
    assert weights(project(lenet, Projected(hidden=None), "Moon")) == 92_626
    assert weights(project(lenet, Projected(), "Moon")) == 238_574


@pytest.mark.parametrize("projection", [True, False])
def test_unit_networks_read_unit_vectors(projection):
    model = project(split(), Projected(projection=projection, hidden=None, width=5), "FedProc", unit=True)
    z = model.features(torch.randn(7, 6))
    assert z.shape == (7, 5 if projection else 4)
    assert z.norm(dim=1).tolist() == pytest.approx([1.0] * 7, abs=1e-6)
    assert torch.equal(model(torch.ones(1, 6)), model.classifier(model.features(torch.ones(1, 6))))


class Deep(nn.Module):
    """A user's network whose classifier has two layers."""

    def __init__(self, embedding=4):
        super().__init__()
        self.features, self.classifier = nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        if embedding:
            self.embedding = embedding

    def forward(self, x):
        return self.classifier(self.features(x))


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [(Moon, {}, "Moon"), (FedProc, {}, "FedProc"), (FedCT, {"base": "moon"}, "FedCT")],
)
def test_a_model_without_a_linear_classifier_is_refused_in_words(kind, settings, named):
    with pytest.raises(ConfigError, match=named):
        kind(**settings).network(Deep())


def test_a_model_that_does_not_say_how_wide_its_embedding_is_is_refused_in_words():
    with pytest.raises(ConfigError, match="embedding"):
        Moon().network(Deep(embedding=None))
    with pytest.raises(ConfigError, match="FedProc"):  # unit vectors take a new network too
        FedProc(projection=False, unit=True).network(Deep())


def test_moon_without_a_head_takes_any_classifier():
    model = Deep(embedding=None)
    assert Moon(projection=False).network(model) is model


@pytest.mark.slow
def test_fedprocs_prototypes_are_means_of_unit_vectors_where_the_network_ends_in_them(tmp_path):
    method = run(tmp_path, "method=fedproc", "method.hidden=8", "method.width=4", "method.unit=true").driver.state
    lengths = np.linalg.norm(method.prototypes, axis=1)
    assert (lengths <= 1 + 1e-6).all()
    assert lengths.max() > 0.5


def share(number, rounds, **own):
    module = two_layers([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    visit = open_visit(ModuleNet(module, torch.device("cpu")), [[1.0, 2.0]], [0], round=number, rounds=rounds)
    visit.extras = {"prototypes": {"mean": np.eye(2)}}
    return float(Prototypical(FedProc.Params(**own)).prepare(visit)["share"])


def test_the_share_of_cross_entropy_grows_over_all_rounds_or_over_the_authors_hundred():
    assert [share(r, 200) for r in (1, 51, 101, 200)] == pytest.approx([0, 0.25, 0.5, 0.995])
    assert [share(r, 200, ramp=100) for r in (1, 51, 101, 200)] == pytest.approx([0, 0.5, 1, 1])


@pytest.mark.slow
def test_resuming_a_unit_network(tmp_path):
    check_resume(tmp_path, "method=fedproc", "method.hidden=8", "method.width=4", "method.unit=true", "method.ramp=2")
