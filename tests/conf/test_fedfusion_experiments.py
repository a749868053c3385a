"""The experiments of the FedFusion paper: they compose, and say what the paper and its code say."""

import pytest

from fedcross.client.visit import learning_rate
from fedcross.conf.schema import load

#: Initial learning rate, its decay, clients per round.
PUBLISHED = {
    "permuted": (2e-3, 0.99, 2),
    "artificial_a": (3e-3, 0.985, 2),
    "artificial_b": (3e-3, 0.985, 5),
    "iid": (5e-3, 0.99, 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("method", "operator"),
    [("fedavg", None), ("fedfusion", "conv"), ("fedfusion_multi", "multi"), ("fedfusion_single", "single")],
)
def test_composes_for_every_method(name: str, method: str, operator: str | None):
    config = load([f"experiment=fedfusion/{name}", f"method={method}"])
    assert getattr(config.method, "operator", None) == operator
    assert config.modules["method"] == method.split("_")[0]
    assert config.names["model"] == ("fedfusion_mnist" if name == "permuted" else "fedfusion_cifar")
    lr, decay, clients = PUBLISHED[name]
    train = config.train
    assert (train.lr, train.lr_decay, config.clients_per_round) == (lr, decay, clients)
    assert (train.lr_min, train.momentum, train.weight_decay, train.epochs, train.batch) == (1e-4, 0.9, 5e-4, 5, 64)
    assert config.evaluate_local
    # Round 3 has decayed twice; the floor holds in the end.
    assert learning_rate(train, 3) == pytest.approx(lr * decay * decay)
    assert learning_rate(train, 2000) == 1e-4
