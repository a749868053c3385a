"""Which client half serves which server, and what a network must have."""

import pytest
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedgen import FedGen
from fedcross.strategies.registry import build_network, method_class, objective_of


@pytest.mark.parametrize(
    ("name", "word"), [("scaffold", "control"), ("heterofl", "labels"), ("moon", "network"), ("fedproc", "prototypes")]
)
def test_a_client_half_that_the_server_does_not_serve_is_refused(name, word):
    params = method_class(name).Params()
    with pytest.raises(ConfigError, match=word):
        objective_of(FedAvg(), name, params)


def test_a_method_that_uses_embeddings_needs_features_and_classifier():
    with pytest.raises(ConfigError, match="features and classifier"):
        build_network(FedGen(), nn.Linear(2, 2), 0)
    model = nn.Linear(2, 2)
    assert build_network(FedAvg(), model, 0) is model
