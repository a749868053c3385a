"""The device that sees all replies: what it sends, by hand, and that the defence gets it."""

import numpy as np
import pytest
import torch

from benchmarks.insider import DEVICE, climber, insider, reversed_sum, settings
from fedcross.conf.schema import load
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.wire.protocol import Upload
from tests.support.single import arrays, begun


def test_the_reversed_sum_has_nearly_the_median_length():
    """(3, 4) and (6, 8), of lengths 5 and 10: -(9, 12) has length 15; .999 of the median 7.5 is -(4.4955, 5.994)."""
    found = reversed_sum([{"w": np.array([3.0, 4.0])}, {"w": np.array([6.0, 8.0])}])
    assert found["w"] == pytest.approx([-4.4955, -5.994])


@pytest.mark.parametrize(("claimed", "counted"), [(None, 1), (2**40, 3)])
def test_the_device_takes_the_round_back_as_far_as_the_defence_lets_it(claimed, counted):
    """Three honest clients go from 0 to 1; the device goes to -.999, and counts as three at most."""
    method = begun(FedAvg, clients_per_round=4, defence=Defence(enabled=True))
    method._sent = {i: arrays(0.0) for i in range(4)}
    uploads = [Upload(i, i, arrays(1.0), {}, 1, {}) for i in range(4)]
    with insider(claimed):
        (false,) = (u for u in method._defend(uploads) if u.client == DEVICE)
    assert false.arrays["w"] == pytest.approx([-0.999, -0.999])
    assert false.num_examples == counted


def test_a_climb_raises_the_loss_of_the_devices_own_examples_within_the_median_length(tmp_path):
    chosen = settings("fedcross", 0.5, 1, 1, tmp_path, "deep")
    config = load(chosen)
    data = config.load_data()
    network, _ = config.network(data.task)
    inputs, labels = data.client(DEVICE, torch.device("cpu"))
    model = {name: weight.detach().numpy().copy() for name, weight in network.named_parameters()}
    found = climber(chosen)(model, [{"w": np.array([3.0, 4.0])}, {"w": np.array([6.0, 8.0])}])
    assert np.sqrt(sum(float((array**2).sum()) for array in found.values())) == pytest.approx(0.999 * 7.5)
    before = torch.nn.functional.cross_entropy(network(inputs), labels).item()
    network.load_state_dict({name: torch.from_numpy((model[name] + found[name]).astype(np.float32)) for name in model})
    assert torch.nn.functional.cross_entropy(network(inputs), labels).item() > 3 * before
