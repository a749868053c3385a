"""The clients' word on a model: what counts, and over whom the mean is."""

from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from fedcross.engines.grid import identify
from fedcross.server.evaluation import across_clients
from fedcross.tasks.accuracies import spread
from fedcross.tasks.models.width import FULL
from fedcross.tasks.scoring import Evaluation
from tests.support.slots import federation
from tests.support.virtual import Clock


class Claims:
    """Client i, on node i + 1, claims the i-th accuracy."""

    blocking = True

    def __init__(self, *accuracies):
        identify()
        self.accuracies, self.partitions, self.sent = accuracies, {i + 1: i for i in range(len(accuracies))}, []

    def get_node_ids(self):
        return list(self.partitions)

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            self.sent.append(message)
        return [message.metadata.message_id for message in self.sent]

    def pull_messages(self, message_ids):
        return [
            Message(RecordDict({"metrics": MetricRecord({"accuracy": accuracy})}), reply_to=message)
            for message, accuracy in zip(self.sent, self.accuracies, strict=True)
        ]


def test_a_client_whose_device_holds_no_width_is_not_asked():
    """Client 0 of three holds half a model, and there are only full ones: the answers are those of 1 and 2."""
    driver = Mock(evaluation=lambda: Evaluation([], {FULL: {"w": np.ones(1, np.float32)}}))
    driver.ledger.widths, driver.settings.deadline_s = (FULL,), 1.0
    driver.nodes.online, driver.nodes.budget = {0: 1, 1: 2, 2: 3}, lambda client: 0.5 if client == 0 else 1.0
    found = across_clients(driver, Claims(0.2, 0.4), 1)
    assert found["client_accuracy"] == {"1": 0.2, "2": 0.4}


def test_an_accuracy_that_is_none_does_not_count(monkeypatch):
    """Of .5, 7, -1, NaN, the number 1 and .7 the first and the last count: their mean is .6."""
    driver, _ = federation(Clock(monkeypatch))
    found = across_clients(driver, Claims(0.5, 7.0, -1.0, float("nan"), 1, 0.7), 1)
    assert found["client_accuracy"] == {"0": 0.5, "5": 0.7}
    assert found["client_accuracy_mean"] == pytest.approx(0.6)
    assert found["client_accuracy_worst_tenth"] == 0.5


@pytest.mark.parametrize(("clients", "worst"), [(9, 0.0), (19, 0.0), (20, 0.5), (29, 0.5), (30, 1.0)])
def test_the_worst_tenth_is_the_mean_of_the_lowest_of_every_ten(clients, worst):
    """Accuracies 0, 1, 2, ... in any order: the lowest 1, 1, 2, 2 and 3 of them."""
    found = spread([float(i) for i in range(clients)][::-1], "x")
    assert found["x_worst_tenth"] == worst
    assert found["x_std"] ** 2 == pytest.approx((clients**2 - 1) / 12)
